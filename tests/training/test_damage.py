"""Whatever happens to a file of a run: it is refused by name, made again, or the result is the same to the last bit."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from broadsight.cli.main import main
from broadsight.runs.classifier import open_classifier
from broadsight.training.objectives.classification import Classification
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder, whole_page, write_page

from .runs import again, everything_in, kill, left_by, small

KIND = dict(model="test_resnet", changes=dict(ema=0.5))


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """A finished run whose best epoch may be any, one that was killed, and another of the same model."""
    folder = tmp_path_factory.mktemp("runs")
    broken = shutil.copytree(images, folder / "data")
    (broken / "train" / "a" / "0.png").write_bytes(b"no image")
    train(small(broken, folder / "finished", **KIND))
    kill(small(broken, folder / "gone", **KIND), folder / "killed", Classification, "step", 5)
    train(small(broken, folder / "other", seed=1, **KIND))
    return {name: folder / name for name in ("finished", "killed", "other")}


def flip(file, draw):
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def into_folder(file, draw):
    file.unlink()
    file.mkdir()


MUTATIONS = {"deleted": lambda file, draw: file.unlink(), "emptied": lambda file, draw: file.write_bytes(b"")}
MUTATIONS |= {"cut": lambda file, draw: os.truncate(file, draw.randrange(file.stat().st_size)), "flipped": flip}
MUTATIONS |= {"a folder": into_folder, "another run's": None}


def cases(runs, flips):
    """Every file of both runs with every mutation, flipped in so many places."""
    for which in ("finished", "killed"):
        for file in sorted(path for path in runs[which].rglob("*") if path.is_file() and path.stat().st_size):
            for name in MUTATIONS:
                for number in range(flips if name == "flipped" else 1):
                    yield which, file.relative_to(runs[which]), name, number


def mutate(runs, case, folder):
    which, file, name, number = case
    shutil.copytree(runs[which], folder)
    if name == "another run's":
        found = sorted(runs["other"].rglob(file.name))
        shutil.copy(found[0] if found else runs["other"] / "config.json", folder / file)
    else:
        MUTATIONS[name](folder / file, random.Random(f"{file}{name}{number}"))


def survives(runs, case, folder, expected):
    mutate(runs, case, folder)
    changed, whole = everything_in(folder), everything_in(runs[case[0]])
    other = changed.get(str(case[1]), (0, None))[1] != whole[str(case[1])][1] if case[1].name != ".lock" else False
    try:
        notes = train(replace(again(folder), resume=True)).notes
    except Exception as error:
        said = str(error)
        assert "\n" not in said and str(folder) in said, (case, error)
        if case[0] == "finished":
            assert everything_in(folder) == changed, case
        return "refused"
    assert left_by(folder) == expected, case
    assert json.loads((folder / "skipped.json").read_text()).keys() == {"a/0.png"}, case
    assert RunFolder(folder).config(), case
    open_classifier(folder, device="cpu")
    kept = ("last", "metrics.jsonl", "model.safetensors", "skipped.json")
    if not other or case[0] != "finished" or case[1].parts[0] not in kept:
        return "the same"
    assert any("was damaged" in note for note in notes), case
    return "made again"


def judged(runs, chosen, tmp_path):
    expected, found = left_by(runs["finished"]), []
    for number, case in enumerate(chosen):
        found.append(survives(runs, case, tmp_path / str(number), expected))
        shutil.rmtree(tmp_path / str(number))
    return found


def test_any_file__some(runs, tmp_path):
    every = [case for case in cases(runs, 1) if case[1].parts[0] not in ("events", "previous", ".lock")]
    finished = [case for case in every if case[0] == "finished" and case[1].parts[0] != "last"]
    draw = random.Random(0)
    found = judged(runs, draw.sample(finished, 12) + draw.sample(every, 4), tmp_path)
    assert {"refused", "made again"} <= set(found)


@pytest.mark.slow
def test_any_file__all(runs, tmp_path):
    found = judged(runs, list(cases(runs, 4)), tmp_path)
    assert len(found) > 150 and {"refused", "made again", "the same"} == set(found)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_opened__refused_by_name(name, runs, tmp_path, capsys):
    """By whoever opens the run; every flip that changes what it says."""
    image = str(next((runs["finished"].parent / "data" / "val").rglob("*.png")))
    for mutation in ("cut", "flipped", "another run's"):
        folder = tmp_path / mutation
        mutate(runs, ("finished", Path(name), mutation, 0), folder)
        commands = [["predict", str(folder), image], ["eval", str(folder)], ["export", str(folder)]]
        commands += [["report", str(folder)], ["train", str(runs["finished"].parent / "data"), "--init", str(folder)]]
        for command in commands[: 4 if name == "config.json" or mutation == "another run's" else 5]:
            assert main([*command, *(["--device", "cpu"] if command[0] != "export" else [])]) in (1, 2), command
            said = capsys.readouterr().err
            assert str(folder) in said and name in said and said.count("\n") == 1, (command, said)


def test_report__refuses_metrics_that_are_not_the_run_s(runs, tmp_path, capsys):
    folder = shutil.copytree(runs["finished"], tmp_path / "run")
    whole = (folder / "metrics.jsonl").read_text()
    for name, text in (("skipped", "{}"), ("metrics", ""), ("metrics", whole[:-9]), ("metrics", whole[1:])):
        (folder / "skipped.json").write_bytes((runs["finished"] / "skipped.json").read_bytes())
        (folder / ("skipped.json" if name == "skipped" else "metrics.jsonl")).write_text(text)
        assert main(["report", str(folder)]) == 2 and f"{name}.json" in (said := capsys.readouterr().err)
        assert "is damaged" in said


def test_best_of_an_earlier_epoch__from_the_copy(images, tmp_path, monkeypatch):
    """The checkpoint's own weights are not the best ones then."""
    goals = iter((90.0, 10.0))
    own = Classification.evaluate

    def falling(self, *args):
        values, skipped = own(self, *args)
        return values | {"val_top1": next(goals)}, skipped

    monkeypatch.setattr(Classification, "evaluate", falling)
    train(small(images, tmp_path / "run"))
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "last" / "update-000000006-evaluated" / "best.safetensors").read_bytes() == weights
    (tmp_path / "run" / "model.safetensors").unlink()
    notes = train(replace(again(tmp_path / "run"), resume=True)).notes
    assert "model.safetensors was damaged (missing): written again from update-000000006-evaluated" in notes
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


def test_page__knows_whether_it_is_whole(tmp_path):
    page = tmp_path / "report.html"
    write_page("<p>Größe</p>\n", page)
    whole = page.read_bytes()
    assert whole_page(page) and not whole_page(tmp_path / "none")
    for place in range(len(whole) - 1):
        page.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert not whole_page(page)
