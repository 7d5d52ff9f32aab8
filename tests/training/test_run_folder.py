"""What a run leaves in its folder, and that timm, TensorBoard and people can read it."""

import builtins
import json
import shutil
import sys
import threading
import time
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from broadsight import __version__
from broadsight.cli.main import main
from broadsight.training import run_folder
from broadsight.training.objectives.classification import Classification
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder, is_run, quiet_tensorboard

from .runs import QUICK, again, kill, left_by, lines_of, small

POOL_ARGS = dict(groups=2, dim=16, pool_options=dict(heads=2))
MODELS = {
    "plain": dict(model="test_vit"),
    "tagged": dict(model="test_resnet.r160_in1k"),
    "map": dict(model="test_resnet", pool="map", pool_args=POOL_ARGS, seed=7),
    "gap": dict(model="test_resnet", pool="gap"),
    "cap": dict(model="test_resnet", pool="cap"),
    "broadcast": dict(model="test_vit", broadcast="cb"),
    "both": dict(model="test_vit", broadcast="gate", pool="map", pool_args=POOL_ARGS),
    "grey": dict(model="test_resnet", model_args=dict(in_chans=1), changes=dict(eval_size=48)),
    "ours": dict(model="emsnet_xxtiny", changes=dict(image_size=64)),
}


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """The folder of a run of some model."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("runs") / name
            fields = MODELS[name] | dict(changes=dict(epochs=1) | MODELS[name].get("changes", {}))
            train(replace(small(images, made[name], **fields), command=f"broadsight train {name}"))
        return made[name]

    return run


@pytest.fixture(scope="module")
def two_epochs(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "run"
    train(small(images, folder))
    return folder


def test_files_metrics_and_config(two_epochs, runs, images):
    names = sorted(path.name for path in two_epochs.iterdir() if not path.name.startswith("."))
    assert names == ["config.json", "events", "last", "metrics.jsonl", "model.safetensors", "previous"]
    assert [path.name for path in (two_epochs / "last").iterdir()] == ["update-000000006-evaluated"]
    assert [path.name for path in (two_epochs / "previous").iterdir()] == ["update-000000006"]
    assert is_run(two_epochs) and not is_run(two_epochs / "last")
    lines = [json.loads(line) for line in (two_epochs / "metrics.jsonl").read_text().splitlines()]
    steps, ends = (("updates", 2, 1), ("updates", 3, 1)), (("updates", 4, 2), ("updates", 6, 2))
    places = [(line["kind"], line["updates"], line["epoch"]) for line in lines]
    assert places == [*steps, ("epoch", 3, 1), *ends, ("epoch", 6, 2)]
    figures = {"train_loss", "train_top1", "val_loss", "val_top1", "best", "best_epoch", "skipped"}
    names = {"updates": {"loss", "lr"}, "epoch": figures}
    assert all(line.keys() == {"kind", "updates", "epoch"} | names[line["kind"]] for line in lines)
    assert lines[2]["train_loss"] == pytest.approx((2 * lines[0]["loss"] + lines[1]["loss"]) / 3)
    config = json.loads((runs("map") / "config.json").read_text())
    expected = dict(architecture="edited", num_classes=4, label_names=list("abcd"))
    expected["model_args"] = dict(backbone="test_resnet", pool="map", pool_args=POOL_ARGS)
    assert config.items() >= expected.items()
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32] and config["pretrained_cfg"]["num_classes"] == 4
    record = config["broadsight"]
    expected = dict(data=str(images), model="test_resnet", recipe="quick", seed=7, log_every=2)
    assert record["settings"].items() >= expected.items()
    expected = QUICK | dict(epochs=1, eval_size=32, optimizer="adamw", lr=1e-3, scale=[0.5, 1.0])
    assert record["recipe"].items() >= expected.items()
    assert record["data"]["counts"] == dict(train=24, val=8) and record["data"]["fingerprint"]
    how = dict(command="broadsight train map", processes=1, threads=1, device="cpu")
    assert record.items() >= (how | dict(task="classify", seed=7)).items()
    versions = record["versions"]
    assert torch.__version__.startswith(versions["torch"]) and versions["timm"] == timm.__version__
    assert __version__ in versions.values()
    assert "commit" in record and record["started"][:2] == "20"
    weights = load_file(runs("map") / "model.safetensors")
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert record["parameters"] == sum(v.numel() for k, v in weights.items() if not k.endswith(buffers))


@pytest.mark.parametrize("classes", [4, 7])
@pytest.mark.parametrize("name", MODELS)
def test_timm_loads_the_best_weights(name, classes, runs):
    """With other classes all but the classifier's, which is new."""
    folder = runs(name)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **{4: {}, 7: dict(num_classes=7)}[classes]).eval()
    expected, own = load_file(folder / "model.safetensors"), model.state_dict()
    assert own.keys() == expected.keys()
    other = [key for key, value in expected.items() if own[key].shape != value.shape]
    assert bool(other) == (classes == 7)
    assert all(torch.equal(own[key], value) for key, value in expected.items() if key not in other)
    ends = model.pretrained_cfg["classifier"]
    ends = (ends,) if isinstance(ends, str) else tuple(ends)
    assert all(key.startswith(tuple(f"{end}." for end in ends)) for key in other)
    assert model.num_classes == classes
    assert model(torch.randn(2, *model.pretrained_cfg["input_size"])).shape == (2, classes)


def test_timm_predicts_as_the_run_evaluated__and_another_run_begins_from_it(runs, images, tmp_path):
    """The transforms that timm reads from the folder, and its weights: the accuracy that the run reports."""
    folder = runs("grey")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    right = []
    for label, name in enumerate("abcd"):
        for path in sorted((images / "val" / name).iterdir()):
            image = transform(Image.open(path).convert("L"))
            assert image.shape == (1, 48, 48)
            right.append(int(model(image[None]).argmax()) == label)
    (line,) = lines_of(folder, "epoch")
    assert 100 * sum(right) / len(right) == line["val_top1"]
    still = dict(lr=1e-30, min_lr=0, warmup_epochs=0, epochs=1)
    train(small(images, tmp_path / "run", model="test_vit", init=str(runs("plain")), changes=still))
    before, after = load_file(runs("plain") / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in after.items())


def expected_events(folder):
    """What TensorBoard must show: every number of the metrics by name, at its update."""
    expected = {}
    for line in RunFolder(folder).metrics():
        for name, value in line.items():
            if name not in ("kind", "updates", "epoch"):
                expected.setdefault(name.replace("_", "/", 1), []).append((line["updates"], pytest.approx(value)))
    return expected


def shown_events(folder):
    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def test_events__the_values_of_the_metrics(two_epochs, tmp_path):
    shown = shown_events(two_epochs)
    speeds = shown.pop("images/per_second")
    assert [step for step, _ in speeds] == [2, 3, 4, 6] and all(value > 0 for _, value in speeds)
    assert shown == expected_events(two_epochs)
    folder = shutil.copytree(two_epochs, tmp_path / "run")  # and resumed, though it is finished
    train(replace(again(folder), resume=True))
    assert shown_events(folder) == shown_events(two_epochs)


@pytest.mark.parametrize(("call", "minutes"), [(3, 10), (3, 0), (5, 0), (6, 10)])
def test_events__after_a_kill(call, minutes, images, two_epochs, tmp_path):
    """Neither lost nor twice: what comes after the checkpoint is purged, what comes before stays."""
    request = small(images, tmp_path / "run", checkpoint_minutes=minutes)
    kill(request, tmp_path / "left", Classification, "step", call)
    for file in (tmp_path / "run" / "events").iterdir():  # as flushed as they could be
        shutil.copy(file, tmp_path / "left" / "events")
    # TensorBoard reads files in the order of the second in their names; no process is started again within one.
    time.sleep(1.01 - time.time() % 1)
    train(replace(again(tmp_path / "left"), resume=True))
    shown = shown_events(tmp_path / "left")
    assert [step for step, _ in shown.pop("images/per_second")] == [2, 3, 4, 6]
    assert shown == expected_events(two_epochs)


def test_skipped(images, tmp_path, capsys):
    data = shutil.copytree(images, tmp_path / "data")
    (data / "train" / "a" / "1.png").write_bytes(b"no image")
    (data / "val" / "b" / "0.png").write_bytes((data / "val" / "b" / "1.png").read_bytes()[:100])
    outcome = train(small(data, tmp_path / "run"))
    skipped = json.loads((tmp_path / "run" / "skipped.json").read_text())
    assert len(skipped) == 2 and all(reason for reason in skipped.values())
    assert [any(name.endswith(end) for name in skipped) for end in ("a/1.png", "b/0.png")] == [True, True]
    assert skipped == outcome.progress.skipped
    assert [line["skipped"] for line in lines_of(tmp_path / "run", "epoch")] == [2, 2]
    assert "2 images skipped" in capsys.readouterr().err
    top1 = [line["val_top1"] for line in lines_of(tmp_path / "run", "epoch")]
    assert all(value * 7 / 100 == pytest.approx(round(value * 7 / 100)) for value in top1)  # of seven that can be read
    request = small(data, tmp_path / "killed", checkpoint_minutes=0)
    kill(request, tmp_path / "left", Classification, "step", 3)
    train(replace(again(tmp_path / "left"), resume=True))
    assert left_by(tmp_path / "left") == left_by(tmp_path / "run")
    assert (tmp_path / "left" / "skipped.json").read_bytes() == (tmp_path / "run" / "skipped.json").read_bytes()


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped__strict(workers, images, tmp_path, capsys):
    data = shutil.copytree(images, tmp_path / "data")
    (data / "train" / "a" / "1.png").write_bytes(b"no image")
    options = ["--model", "test_vit", "--size", "32", "--batch", "8", "--workers", str(workers), "--threads", "1"]
    assert main(["train", str(data), "--out", str(tmp_path / "run"), "--strict", *options]) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("broadsight: ") and "a/1.png cannot be read" in said[-1]
    assert not any("Traceback" in line for line in said)


LINES = [
    dict(kind="updates", updates=2, epoch=1, loss=2.0, lr=0.1),
    dict(kind="epoch", updates=2, epoch=1, train_loss=2.0, val_loss=1.5, val_top1=50.0, train_top1=40.0),
    dict(kind="updates", updates=4, epoch=2, loss=1.0, lr=0.05),
    dict(kind="epoch", updates=4, epoch=2, train_loss=1.0, val_loss=1.2, val_top1=60.0),
]


def test_curves__an_image_not_too_often(drawn, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.create({})
    for line in LINES:
        folder.record(line)
    folder.draw()
    with Image.open(tmp_path / "curves.png") as image:
        image.verify()
        assert image.format == "PNG" and image.width > 2 * image.height > 400
    assert not list(tmp_path.glob(".*"))
    run_folder.draw_curves(LINES[:1], tmp_path / "begun.png")  # no epoch yet
    Image.open(tmp_path / "begun.png").verify()
    # Of dense runs: no loss on the validation images, and what the task is after instead of accuracy
    for goal in ("val_box_ap", "val_mask_ap", "val_keypoint_ap", "val_miou"):
        figures = {goal: 12.0, "val_box_ap": 10.0, "val_box_ap50": 30.0}
        epoch = dict(kind="epoch", updates=2, epoch=1, train_loss=2.0, **figures)
        run_folder.draw_curves([dict(kind="updates", updates=1, epoch=1, loss=3.0, lr=0.1), epoch], tmp_path / goal)
        assert (tmp_path / goal).stat().st_size > 1000
    calls, now = [], [folder._drawn + 1000.0]
    monkeypatch.setattr(run_folder, "draw_curves", lambda lines, path: calls.append(path))
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: now[0])
    folder = RunFolder(tmp_path)
    folder.draw(at_most_every=60)
    now[0] += 59
    folder.draw(at_most_every=60)
    assert len(calls) == 1
    folder.draw()
    now[0] += 61
    folder.draw(at_most_every=60)
    assert len(calls) == 3


def test_metrics__continued_after_so_many_bytes_by_the_first_process_alone(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create({})
    folder.open_logs(0, 0)
    for line in LINES[:2]:
        folder.record(line)
    size = folder.metrics_size()
    folder.record(LINES[2])
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "ep')  # killed while it was written
    folder = RunFolder(tmp_path)
    folder.open_logs(size, 2)
    assert folder.metrics() == LINES[:2] and folder.metrics_size() == size
    folder.record(LINES[2])
    folder.close()
    assert folder.metrics() == LINES[:3]
    folder.open_logs(10**6, 2)  # more than there is, after a power failure: nothing is made up
    folder.close()
    assert folder.metrics() == LINES[:3]
    folder = RunFolder(tmp_path / "run", writing=False)
    folder.create({})
    folder.open_logs(0, 0)
    folder.record(LINES[0])
    folder.keep_best(nn.Linear(1, 1))
    folder.report_skipped({"a": "b"})
    folder.draw()
    folder.close()
    assert not (tmp_path / "run").exists()
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config.json is damaged .*; it cannot be continued"):
        RunFolder(tmp_path).config()


def test_without_extras(drawn, tmp_path, monkeypatch):
    """TensorBoard and matplotlib are extras: without them there are neither events nor curves."""
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "matplotlib.backends"))]:
        monkeypatch.delitem(sys.modules, name)
    find = builtins.__import__

    def without(name, *rest):
        if name.startswith(("torch.utils.tensorboard", "matplotlib")):
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    folder = RunFolder(tmp_path)
    folder.create({})
    folder.open_logs(0, 0)
    folder.record(LINES[0])
    folder.draw()
    folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "last", "metrics.jsonl"]


def test_quiet_tensorboard__leaves_other_threads_errors(monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: printed.append(type(arguments.thread)))
    before = threading.excepthook

    class Writer(threading.Thread):
        __module__ = "tensorboard.summary"

        def run(self):
            raise OSError

    class Other(Writer):
        __module__ = "elsewhere"

    with quiet_tensorboard():
        for thread in (Writer(), Other()):
            thread.start()
            thread.join()
    assert printed == [Other] and threading.excepthook is before
