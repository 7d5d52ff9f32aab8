"""eval, predict and report of dense runs, through the command line."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from broadsight.cli.main import main
from broadsight.data.sources.mask_folders import read_indices
from broadsight.dense.scoring import ObjectScorer
from broadsight.runs.dense_model import open_dense
from broadsight.training.run import train

from ..training.dense_runs import ask_dense, write_coco


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def detector(coco, tmp_path_factory):
    """Trained until it finds the squares."""
    folder = tmp_path_factory.mktemp("runs") / "detector"
    changes = dict(epochs=1, epoch_updates=50, batch_size=4, lr=3e-3, hflip=0.0, resize=[1.0, 1.0])
    train(ask_dense("retinanet", folder, data=str(coco), val=str(coco), changes=changes))
    return folder


@pytest.fixture(scope="module")
def segmenter(coco, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "segmenter"
    train(ask_dense("semantic_fpn", folder, data=str(coco), val=str(coco)))
    return folder


def scored(coco, results: object) -> COCOeval:
    """What pycocotools says of boxes."""
    truth = COCO(str(coco))
    oracle = COCOeval(truth, truth.loadRes(results), "bbox")
    oracle.evaluate(), oracle.accumulate(), oracle.summarize()
    return oracle


@pytest.fixture
def done(capsys):
    """Runs a command that has to succeed: (stdout, stderr)."""

    def call(*argv: object) -> tuple[str, str]:
        assert main([*map(str, argv), "--threads", "1"]) == 0
        return capsys.readouterr()

    return call


def read(file: Path):
    return json.loads(file.read_text("utf-8"))


def test_eval__figures_are_those_of_pycocotools_on_the_files_and_views_are_kept(
    detector, coco, tmp_path, monkeypatch, done
):
    monkeypatch.chdir(tmp_path)
    views = "--flip", "--scales", "1,1.5", "--samples", "2", "--workers", "0", "--json", "-"
    record = json.loads(done("eval", detector, coco, *views)[0])
    assert record["views"] == dict(flip=True, scales=[1.0, 1.5], slide=False, size=None)
    assert record["data"]["images"] == 2
    assert (tmp_path / "evaluations" / "annotations-json-retinanet-test_resnet-1" / "report.html").is_file()
    out = tmp_path / "evaluation"
    shown, _ = done("eval", detector, coco, "--out", out, "--workers", "0")
    record = read(out / "evaluation.json")
    expected = list(100 * scored(coco, str(out / "results.json")).stats[:3])
    figures = [record["figures"][name] for name in ("box_ap", "box_ap50", "box_ap75")]
    assert figures == pytest.approx(expected, abs=1e-2)
    assert record["figures"]["box_ap50"] > 20  # it has learned something, so that this says something
    assert {row["name"]: row["objects"] for row in record["per_class"]} == {"green": 2, "red": 2}
    page = (out / "report.html").read_text("utf-8")
    assert "Found in images" in page and "000000000001.png" in page and "box AP %" in shown


def test_precision__half_finds_the_same_and_is_recorded(detector, segmenter, coco, tmp_path, done):
    figures: dict[str, list[float]] = {}
    for kind in ("fp32", "bf16"):
        options = "--workers", "0", "--precision", kind, "--json", tmp_path / "record.json"
        for run, name in ((detector, "box_ap50"), (segmenter, "miou")):
            _, said = done("eval", run, *options)
            record = read(tmp_path / "record.json")
            assert record["model"]["precision"] == kind and ("computes in bf16" in said) == (kind == "bf16")
            figures.setdefault(name, []).append(record["figures"][name])
    assert all(single == pytest.approx(half, abs=5) for single, half in figures.values())
    image = coco.parent / "images" / "000000000001.png"
    for kind in ("fp32", "bf16"):
        done("predict", detector, image, "--json", tmp_path / f"{kind}.json", "--precision", kind)
    assert read(tmp_path / "bf16.json.settings.json")["model"]["precision"] == "bf16"
    best = [max(read(tmp_path / f"{kind}.json"), key=lambda one: one["score"]) for kind in ("fp32", "bf16")]
    assert best[0]["bbox"] == pytest.approx(best[1]["bbox"], abs=1) and best[0]["bbox"] != best[1]["bbox"]


def test_segmenter__eval_of_what_it_validated_on_report_and_class_maps(segmenter, coco, tmp_path, done):
    out = tmp_path / "evaluation"
    done("eval", segmenter, "--out", out, "--workers", "0")
    lines = [json.loads(line) for line in (segmenter / "metrics.jsonl").read_text("utf-8").splitlines()]
    figures = read(out / "evaluation.json")["figures"]
    assert figures["miou"] == pytest.approx(lines[-1]["val_miou"], abs=1e-3)
    assert not (out / "results.json").exists()
    done("report", segmenter, "--workers", "0")
    page = (segmenter / "report.html").read_text("utf-8")
    assert "Training run" in page and "mIoU" in page and "Found in images" in page
    done("predict", segmenter, coco.parent / "images", "--out", tmp_path / "drawn", "--slide")
    classes = read_indices(tmp_path / "drawn" / "masks" / "000000000002.png")
    assert classes.shape == (64, 80) and classes.max() <= 2
    assert not (tmp_path / "drawn" / "results.json").exists()


def test_predict__draws_and_writes_results(detector, coco, tmp_path, done):
    images, out, rows = coco.parent / "images", tmp_path / "drawn", tmp_path / "boxes.csv"
    shown, _ = done("predict", detector, images, "--out", out, "--csv", rows, "--threshold", "0.3")
    assert sorted(path.name for path in out.glob("*.png")) == [f"{n:012d}.png" for n in range(1, 5)]
    results = read(out / "results.json")
    assert {entry["image_id"] for entry in results} == {1, 2, 3, 4}  # the numbers that the files are named by
    assert {entry["category_id"] for entry in results} <= {3, 7}
    assert scored(coco, results).stats[1] > 0.2
    table = list(csv.DictReader(rows.open(encoding="utf-8")))
    assert len(table) == len(results) and table[0].keys() >= {"file", "class", "score", "x", "width"}
    assert read(out / "results.json.settings.json")["model"]["task"] == "detect"
    with Image.open(out / "000000000001.png") as drawn:
        assert max(drawn.size) > 200  # small images are enlarged
    assert "drawn:" in shown


def test_predict__pose_of_boxes_that_are_given(coco, tmp_path, capsys, done):
    image, out, pose = coco.parent / "images" / "000000000001.png", tmp_path / "drawn", tmp_path / "pose"
    train(ask_dense("simple_baseline", pose))
    capsys.readouterr()
    assert "each image is taken for one object" in done("predict", pose, image, "--out", out)[1]
    done("predict", pose, image, "--boxes", coco, "--json", tmp_path / "r.json")
    (whole,), (one,) = read(out / "results.json"), read(tmp_path / "r.json")
    assert (whole["bbox"], one["bbox"]) == ([0, 0, 80, 64], [8, 6, 28, 28])
    assert len(one["keypoints"]) == len(whole["keypoints"])


def test_predict__narrow_and_broken_images_cost_the_others_nothing(detector, segmenter, tmp_path, done):
    """Of a side of one pixel nothing would be left once the other is made smaller."""
    given, out = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    for width, height in ((8000, 1), (1, 8000), (60, 40)):
        Image.new("RGB", (width, height), (9, 200, 30)).save(given / f"{width}x{height}.png")
    Image.fromarray(np.zeros((40, 60), np.uint8)).save(given / "60xgrey.png")
    good = sorted(path.name for path in given.iterdir())
    (given / "broken.png").write_bytes(b"not an image")
    for run in (detector, segmenter):
        (said,) = [line for line in done("predict", run, given, "--out", out)[1].splitlines() if "be read" in line]
        assert "broken.png" in said and sorted(path.name for path in out.glob("*.png")) == good
        for name in good:
            with Image.open(out / name) as drawn:
                assert drawn.width >= int(name.partition("x")[0])


def test_predict__an_image_that_memory_does_not_suffice_for_is_named(detector, tmp_path, monkeypatch, done):
    find = ObjectScorer.find

    def fail(self, model, images):
        if images[0].shape[-1] == 500:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")
        return find(self, model, images)

    monkeypatch.setattr(ObjectScorer, "find", fail)
    (tmp_path / "in").mkdir()
    for name, width in (("a", 60), ("b", 500), ("c", 60)):
        Image.new("RGB", (width, 40), (9, 200, 30)).save(tmp_path / "in" / f"{name}.png")
    _, said = done("predict", detector, tmp_path / "in", "--out", tmp_path / "out")
    assert "b.png" in said and "out of memory while it is prepared" in said
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == ["a.png", "c.png"]


def paint(folder, shown, classes):
    """An image and a mask for each set of classes, which have a stripe each."""
    for number, values in enumerate(shown):
        mask = np.zeros((32, 32), np.uint8)
        for value in values:
            mask[6 * value : 6 * value + 5] = value
        for place, pixels in (("images", np.repeat(60 * mask[..., None], 3, 2)), ("masks", mask)):
            (folder / place).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / place / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join(classes))
    return folder


SMALL = ["--task", "segment", "--head", "semantic_fpn", "--head-args", "pyramid_channels=32", "channels=16"]
SMALL += ["--model", "test_resnet", "--set", "epochs=1", "warmup_epochs=0", "batch_size=2", "image_size=32"]
SMALL += ["--workers", "0", "--device", "cpu"]


def test_segment__a_hold_out_of_one_class_has_no_miou(tmp_path, done):
    """It had 100 %, for ever the best."""
    data, run = paint(tmp_path / "data", [()] * 5 + [(1,)], ["ground", "crack"]), tmp_path / "run"
    out, err = done("train", data, *SMALL, "--out", run)
    assert "classes without pixels to validate on: crack (of 2 classes)" in err and "100.00" not in out
    assert "no epoch has a mIoU to be compared by: the weights are those of the last one" in out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    shown = {name: lines[-1][name] for name in ("val_miou", "val_macc", "val_classes", "best", "best_epoch")}
    assert shown == dict(val_miou=None, val_macc=None, val_classes=1, best=None, best_epoch=0)
    page = (run / "report.html").read_text("utf-8")
    assert "mIoU needs pixels of at least two classes; the masks show 1" in page and ">nan" not in page
    out, _ = done("eval", run, "--workers", "0", "--out", tmp_path / "out")
    record = read(tmp_path / "out" / "evaluation.json")
    assert record["figures"]["miou"] is None and "at least two classes" in record["absent"]["miou"]
    assert record["coverage"] == dict(occurring=1, classes=2) and record["per_class"][1]["iou"] is None
    assert "means over 1 of 2 classes: the others have no pixels here" in out


def test_segment__says_over_how_many_classes_and_holds_out_as_it_began(tmp_path, done, monkeypatch):
    data = paint(tmp_path / "data", [(1,)] * 8 + [(1, 2)] * 2 + [(1, 3)], ["ground", "a", "b", "c"])
    monkeypatch.setattr("broadsight.training.settings.METHOD", 1)
    done("train", data, *SMALL, "--out", tmp_path / "old", "--no-report")
    monkeypatch.undo()
    out, _ = done("train", data, *SMALL, "--out", tmp_path / "new", "--no-report")
    assert "% over 3 of 4 classes in epoch" in out  # b is held out, c is in one image alone
    config = read(tmp_path / "old" / "config.json")
    del config["broadsight"]["settings"]["hold_out"]  # as runs were before
    del config["broadsight"]["digest"]  # as runs of that time have none
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    old, new = (open_dense(tmp_path / name).own_data().val for name in ("old", "new"))
    held = [{view.name(place) for place in range(len(view))} & {"8.png", "9.png"} for view in (old, new)]
    assert held[1] and not held[0]
    assert "held out as when the run began" in done("train", "--resume", "--out", tmp_path / "old", "--no-report")[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["eval", "RUN", "COCO", "--suite", "fgsm"], "--suite is for classifiers"),
        (["eval", "RUN", "nowhere"], "no such data: nowhere"),
        (["eval", "RUN", "COCO", "--size", "8"], "--size 8; expected 32 pixels or more"),
        (["eval", "RUN", "COCO", "--scales", "0"], "expected one or more factors above 0"),
        (["eval", "RUN", "COCO", "--samples", "0"], "--samples 0; expected 1 or more"),
        (["predict", "RUN", "IMAGES", "--threshold", "2"], "--threshold 2.0; expected 0 to 1"),
        (["predict", "RUN", "IMAGES", "--boxes", "COCO"], "--boxes is for pose models; retinanet finds objects"),
        (["predict", "RUN", "IMAGES", "--out", "COCO"], "is a file; expected a folder"),
        (["predict", "RUN"], "no images given"),
        (["predict", "test_resnet", "IMAGES", "--out", "x"], "--out is for dense runs"),
        (["eval", "test_resnet", "scenes", "--flip"], "--flip is for dense runs"),
        (["train", "scenes:8", "--task", "detect", "--head", "mask_rcnn"], "--head mask_rcnn with --task detect"),
        (["train", "scenes:8", "--head", "fcos"], "--head is for dense tasks"),
    ],
)
def test_refusals__in_one_line(arguments, message, detector, coco, capsys):
    places = {"RUN": str(detector), "COCO": str(coco), "IMAGES": str(coco.parent / "images")}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("broadsight: ") and message in error


def test_eval__classes_that_the_model_has_not_and_an_extra_that_is_missing(
    detector, coco, tmp_path, monkeypatch, capsys
):
    content = json.loads(coco.read_text("utf-8"))
    content["categories"][0]["name"] = "blue"
    other = tmp_path / "other.json"
    (tmp_path / "images").symlink_to(coco.parent / "images")
    other.write_text(json.dumps(content), "utf-8")
    assert main(["eval", str(detector), str(other), "--workers", "0"]) == 2
    assert "has classes that the model has not: blue" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    out = tmp_path / "run"
    arguments = ["train", str(coco), "--task", "detect", "--model", "test_resnet", "--size", "64", "--out", str(out)]
    assert main([*arguments, "--head-args", "width=32", "--workers", "0"]) == 2
    assert 'pip install "broadsight[det]"' in capsys.readouterr().err and not out.exists()
