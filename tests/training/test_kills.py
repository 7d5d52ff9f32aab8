"""Runs of several tasks whose process is killed at random moments while a second one tries to write."""

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from broadsight.training import lock, run_folder
from broadsight.training.request import Request
from broadsight.training.run import train

from .dense_runs import ask_dense
from .runs import left_by, new_processes, wait_for

KILLS = int(os.environ.get("BROADSIGHT_KILLS", "6"))  # of each task


def request_for(head: str, out: Path) -> Request:
    if head != "classify":
        return replace(ask_dense(head, out, changes=dict(epochs=2)), checkpoint_minutes=0)
    small = dict(epochs=2, batch_size=4, image_size=32, warmup_epochs=0)
    options = dict(threads=1, workers=1, device="cpu", report=False, checkpoint_minutes=0)
    return Request(data="scenes:24", model="test_vit", out=str(out), set=small, **options)


def run(head: str, out: Path, said: Path, patience: float) -> None:
    """In a process of its own: begin or continue a run, and write down how that ended."""
    run_folder.draw_curves = lambda lines, path: None
    lock.PATIENCE = patience
    said.write_text("begun")
    try:
        train(replace(request_for(head, out), resume=True))
        said.write_text("done")
    except Exception as error:
        said.write_text(f"{type(error).__name__}: {error}")


def holds(process, folder):
    file = folder / lock.LOCK
    return file.exists() and file.read_text().startswith(f"{process.pid} ")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["classify", "mask_rcnn", "simple_baseline"])
def test_killed_with_two_writers__same_result(head, tmp_path):
    context, draw = new_processes(), random.Random(head)

    def start(out, name, patience=5.0):
        process = context.Process(target=run, args=(head, tmp_path / out, tmp_path / name, patience))
        process.start()
        wait_for((tmp_path / name).exists, 300)
        return process

    def finish(out):
        began, process = time.monotonic(), start(out, f"{out}-said")
        process.join(300)
        assert (tmp_path / f"{out}-said").read_text() == "done"
        return time.monotonic() - began

    took, refused = finish("whole"), 0
    for number in range(KILLS):
        first = start("run", f"first-{number}")
        wait_for(lambda one=first: holds(one, tmp_path / "run") or not one.is_alive(), 300)
        second = start("run", f"second-{number}", patience=0.0)
        time.sleep(draw.uniform(0, took / 3))
        alive = first.is_alive()
        first.kill()
        first.join()
        second.join(0.1)
        second.kill()
        second.join()
        said = (tmp_path / f"second-{number}").read_text()
        assert said in ("begun", "done") or said.startswith("ValueError: "), said
        refused += alive and f"is being written by process {first.pid}" in said
    finish("run")
    assert refused
    assert left_by(tmp_path / "run") == left_by(tmp_path / "whole")
