"""Dense runs through the export command: what is written finds what the run finds, and what cannot be is refused."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from broadsight.cli.main import main
from broadsight.data.scenes import draw_scene
from broadsight.data.sources.mask_folders import read_indices
from broadsight.deployment import Session, open_artefact
from broadsight.deployment import run as exporting
from broadsight.deployment.dense.raw import raw_model
from broadsight.deployment.dense.session import differences, find, predict_images
from broadsight.deployment.dense.subject import of_dense
from broadsight.deployment.formats import FORMATS
from broadsight.deployment.run import write_artefact
from broadsight.deployment.subject import Subject
from broadsight.runs.dense_model import open_dense
from broadsight.training.run import train
from broadsight.weights.reading import weights_digest
from tests.deployment.tiny import ask, needed
from tests.refusals import refused

from ...training.dense_runs import ask_dense, write_coco
from .models import HEADS, dense_run, in_torch, make_image


def of_opened(run: Any, command: str, images: list[str] | tuple[()] = (), **options) -> Subject:
    """Of a run of no folder."""
    return of_dense(run, command, images, config={}, **options)


@pytest.fixture(scope="module")
def coco(tmp_path_factory) -> Path:
    """Four images, 80 pixels wide and 64 high."""
    return write_coco(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def detector(coco, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "detector"
    small = dict(width=32, score_thresh=0.02)  # so early it is not sure of much
    changes = dict(epochs=1, epoch_updates=20, batch_size=4, lr=3e-3, hflip=0.0, resize=[1.0, 1.0])
    train(ask_dense("retinanet", folder, data=str(coco), val=str(coco), head_args=small, changes=changes))
    return folder


def predicted(run: Path, folder: Path, images: list[Path]) -> list[dict]:
    """What `broadsight predict` finds, as COCO's results have it."""
    file = folder / "results.json"
    assert main(["predict", str(run), *map(str, images), "--threads", "1", "--json", str(file)]) == 0
    return json.loads(file.read_text("utf-8"))


def assert_same_boxes(session: Session, images: list[Path], run: Path, folder: Path) -> None:
    """Every object of an artefact is in what `broadsight predict` finds, and none is missing."""
    expected = predicted(run, folder, images)
    found = predict_images(session, [Image.open(path) for path in images])
    decoding = session.description.decoding
    assert decoding is not None and sum(len(one["scores"]) for one in found) == len(expected) > 20
    for path, one in zip(images, found, strict=True):
        entries = [entry for entry in expected if entry["file_name"] == str(path)]
        corners = np.array([entry["bbox"] for entry in entries]).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        labels = np.array([decoding["category_ids"].index(entry["category_id"]) + 1 for entry in entries])
        scores = np.array([entry["score"] for entry in entries])
        there = differences(one, {"boxes": corners, "labels": labels, "scores": scores})
        assert there["differing"] == 0 and there["pixels"] < 0.02
        np.testing.assert_allclose(np.sort(one["scores"]), np.sort(scores), atol=1e-4)


def test_export__finds_what_predict_finds(detector, coco, tmp_path):
    images = sorted((coco.parent / "images").glob("*.png"))
    # 64 x 80 is what the run sees of them, padded to this
    subject = of_dense(detector, "a test", [str(coco.parent / "images")], canvas=(64, 96))
    found = write_artefact(subject, tmp_path / "net.pt2", ask("pt2", rounds=0))
    assert found.agreement.images == 4 and found.agreement.relative < 1e-5
    assert found.findings is not None and found.findings["differing"] == 0 and found.findings["pixels"] < 1e-3
    assert_same_boxes(open_artefact(tmp_path / "net.pt2"), images, detector, tmp_path)


def test_of_dense__describes_the_run(detector):
    subject = of_dense(detector, "broadsight export detector", count=2)
    said = subject.description
    assert (said.task, said.title, said.source) == ("detect", "retinanet-test_resnet", "detector")
    assert said.classes == ("green", "red") and said.decoding is not None
    assert said.decoding["category_ids"] == [3, 7] and said.decoding["head"] == "retinanet"
    assert said.image == dict(channels=3, height=128, width=128, any_batch=True, any_size=False)
    assert (said.preprocessing["short_side"], said.preprocessing["long_side"]) == (64, 107)
    about = said.provenance
    assert about["command"] == "broadsight export detector" and about["run"]["settings"]["head"] == "retinanet"
    run = open_dense(detector, device="cpu")
    assert about["weights_sha256"] == weights_digest(run.model.state_dict()) and about["parameters"] == run.parameters
    assert subject.shown.startswith("images that the run validated on")
    assert [image.shape for image in subject.images(None)] == [(1, 3, 128, 128)] * 2
    odd, own = subject.images(99)
    assert odd.shape == (1, 3, 67, 89) and own.shape == (1, 3, 64, 96)  # the run's images are 64 x 80
    assert of_dense(detector, "", count=1, size=96).description.preprocessing["short_side"] == 96


def test_export_command__says_how_far_apart_findings_are(detector, coco, tmp_path, capsys):
    target, images = str(tmp_path / "net.pt2"), str(coco.parent / "images")
    arguments = ["--format", "pt2", "--out", target, "--rounds", "0", "--compare", "2", "--images", images]
    assert main(["export", str(detector), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "max error to torch" in shown and "decoded: 0.00% of the objects differ" in shown
    record = json.loads((tmp_path / "net.pt2.export.json").read_text("utf-8"))
    assert record["findings"]["differing"] == 0 and record["agreement"]["images"] == 2
    assert record["compared_on"] == f"images of {images}"


# ---- What cannot be, in one line and at once


def as_run_of(folder: Path, head: str, task: str) -> Path:
    """No more than what a run's folder says of itself."""
    folder.mkdir()
    settings = dict(data="a", model="test_resnet", pool="gap", broadcast=None, seed=0, head=head, neck="fpn")
    labels = dict(category_ids={}, keypoint_names=[], flip_pairs=[], skeleton=[], keypoint_offset=0)
    about = dict(task=task, settings=settings, recipe={}, parameters=1, labels=labels)
    (folder / "config.json").write_text(json.dumps({"architecture": "dense_model", "broadsight": about}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    ("head", "options", "words"),
    [
        ("mask_rcnn", ["--format", "pt2"], ("mask_rcnn looks into regions", "semantic_fpn")),
        ("fcos", ["--format", "web"], ("--format web is a page for classifiers", "expected onnx, openvino")),
        ("fcos", ["--format", "onnx", "--int8"], ("--int8 is for classifiers",)),
    ],
)
def test_export_command__refuses_regions_pages_and_int8(head, options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exporting, "check_request", lambda wanted, int8=False: FORMATS[wanted.format])
    run = as_run_of(tmp_path / "run", head, "instances" if head == "mask_rcnn" else "detect")
    assert main(["export", str(run), *options]) == 2
    said = capsys.readouterr().err.strip()
    assert all(word in said for word in words) and "\n" not in said
    assert [*tmp_path.iterdir()] == [run]


# ---- Images to compare on


def test_of_opened__says_why_a_head_takes_one_size_and_draws_scenes_where_the_images_are_gone():
    for kind, why in (("ssdlite", "made for 96x80"), ("simple_baseline", "looks at crops of 96x64"), ("fcos", "")):
        subject = of_opened(dense_run(kind), "", count=1)
        assert why in subject.obstacle and bool(why) == bool(subject.obstacle) == (subject.example_size is None)
    subject = of_opened(dense_run("semantic_fpn"), "", count=3)
    assert subject.shown == "drawn scenes" and len(subject.images(None)) == 3
    assert any("not square are made to fit 64x64" in note for note in subject.notes)
    assert not of_opened(dense_run("semantic_fpn"), "", count=1, any_size=True).notes
    crops = of_opened(dense_run("simple_baseline"), "", count=4).images(None)
    assert [crop.shape for crop in crops] == [(1, 3, 96, 64)] * 4


def test_of_opened__leaves_out_what_cannot_be_read(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "b.png")
    (tmp_path / "a.png").write_bytes(b"no image")
    assert len(of_opened(dense_run("fcos"), "", [str(tmp_path)], count=5).images(None)) == 1
    asked = of_opened, dense_run("fcos"), ""
    refused("none of the 1 images to compare on can be read; ", *asked, [str(tmp_path / "a.png")])
    refused("no such file", *asked, [str(tmp_path / "c.png")], error=FileNotFoundError)


class TwoImages:
    """Each with three objects, the second without a width."""

    def __len__(self) -> int:
        return 2

    def open(self, place: int) -> Image.Image:
        return Image.new("RGB", (50, 60))

    def target(self, place: int) -> dict:
        return {"boxes": [[1, 1, 30, 40], [5, 5, 5, 9], [2, 3, 20, 20]]}


def test_of_opened__crops_of_the_objects_that_the_run_validated_on():
    known = vars(dense_run("simple_baseline")) | dict(own_data=lambda: SimpleNamespace(val=TwoImages()))
    for count, crops in ((9, 4), (3, 3)):
        subject = of_opened(SimpleNamespace(**known), "", count=count)
        assert subject.shown == "images that the run validated on (elsewhere)"
        assert len(subject.images(None)) == crops


@pytest.mark.parametrize("kind", ["fcos", pytest.param("simple_baseline", marks=pytest.mark.slow)])
def test_of_opened__no_padding_where_attention_chooses(kind):
    subject = of_opened(dense_run(kind, "partialformer_b0"), "", count=2)
    assert subject.shown == "drawn scenes, stretched to leave no padding"
    plain = of_opened(dense_run(kind), "", count=2)
    for one, other in zip(subject.images(None), plain.images(None), strict=True):
        assert one.shape == other.shape and np.abs(one[..., -8:, -8:]).max() > 0
    if kind == "fcos":
        assert all(np.abs(one[..., -8:, -8:]).max() == 0 for one in plain.images(None))
        assert [one.shape[2:] for one in plain.images(99)] == [(67, 89), (64, 96)]
        assert [one.shape[2:] for one in subject.images(99)] == [(96, 96), (64, 96)]


# ---- All heads, backbones and runtimes

PACKAGES = {"rtdetr": "transformers", "upernet": "segmentation_models_pytorch"}


def exported(kind: str, format: str, folder: Path, *model: str) -> Session:
    """Written, opened and compared, for any size where that can be."""
    needed(format)
    pytest.importorskip(PACKAGES.get(kind, "torch"))
    run = dense_run(kind, *model)
    subject, form = of_opened(run, "a test", count=3), FORMATS[format]
    any_size = form.sizes and not subject.obstacle
    target = folder / f"net{form.suffix}"
    found = write_artefact(subject, target, ask(format, any_size=any_size, rounds=0))
    assert found.findings is not None and found.findings["differing"] < 0.01
    session = open_artefact(target)
    assert session.description.image["any_size"] == any_size
    return session


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino", "pt2", "executorch"])
@pytest.mark.parametrize("kind", HEADS)
def test_export__every_head(kind, format, tmp_path):
    session, raw = exported(kind, format, tmp_path), raw_model(dense_run(kind))
    for one in (make_image(), make_image(64, 64, seed=1), make_image(90, 133, seed=2), make_image(300, 20, seed=3)):
        there = differences(predict_images(session, [one])[0], find(in_torch(raw), session.description, one))
        assert there["differing"] < 0.01 and there["pixels"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino", "pt2", "executorch"])
@pytest.mark.parametrize("kind", ["retinanet", "semantic_fpn"])
@pytest.mark.parametrize("backbone", ["test_resnet", "partialformer_b0", "emsnet_xxtiny", "mat_1", "stvit_small"])
def test_export__every_backbone_with_a_multi_token_neck(backbone, kind, format, tmp_path):
    exported(kind, format, tmp_path, backbone, "tokens" if backbone == "mat_1" else "map")


@pytest.mark.slow
def test_export__queries_from_equal_scores(tmp_path):
    needed("onnx")
    pytest.importorskip("transformers")
    run = deepcopy(dense_run("rtdetr"))
    run.model.detector.model.enc_score_head.weight.data.zero_()  # as good as untrained: any choice is right
    found = write_artefact(of_opened(run, "a test", count=3), tmp_path / "net.onnx", ask("onnx", rounds=0))
    assert found.agreement.relative < 1e-4


# ---- The whole way, by commands alone

SMALL = {
    "fcos": ["--task", "detect", "--head-args", "width=64", "score_thresh=0.02"],
    "ssdlite": ["--task", "detect", "--head-args", "extra_widths=[32,16,16,16]"],
    "rtdetr": ["--task", "detect", "--head-args", "channels=32", "heads=2", "feed_forward=32", "decoder_layers=2"],
    "semantic_fpn": ["--task", "segment", "--head-args", "pyramid_channels=32", "channels=16"],
    "simple_baseline": ["--task", "keypoints", "--head-args", "channels=16"],
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> list[Path]:
    """Three drawn images, one of them not square."""
    folder = tmp_path_factory.mktemp("images")
    for number, size in enumerate([(96, 96), (96, 96), (80, 130)]):
        Image.fromarray(draw_scene(number, size=size, split="test").image).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("head", SMALL)
def test_commands__train_export_predict(head, scenes, tmp_path):
    pytest.importorskip(PACKAGES.get(head, "torch"))
    run = str(tmp_path / "run")
    small = ["--epochs", "2", "--size", "96", "--batch", "4", "--threads", "1", "--workers", "0", "--no-report"]
    arguments = ["train", "scenes:32", "--model", "test_resnet", "--head", head, *SMALL[head], *small, "--out", run]
    assert main([*arguments, "--plain"]) == 0
    for format in ("onnx", "openvino", "pt2", *(["executorch"] if head != "fcos" else [])):
        needed(format)
        target, form = tmp_path / f"net{FORMATS[format].suffix}", FORMATS[format]
        free = ["--any-size"] if head in ("fcos", "semantic_fpn") and form.sizes else []
        assert main(["export", run, "--format", format, "--out", str(target), "--rounds", "0", *free]) == 0
        session = open_artefact(target)
        shown = scenes if free or head not in ("fcos", "semantic_fpn") else scenes[:2]  # a fixed canvas is square
        if head == "semantic_fpn":
            assert main(["predict", run, *map(str, shown), "--out", str(tmp_path / "drawn"), "--threads", "1"]) == 0
            found = predict_images(session, [Image.open(path) for path in shown])
            for path, one in zip(shown, found, strict=True):
                expected = read_indices(tmp_path / "drawn" / "masks" / path.name)
                assert (one["classes"] != expected).mean() < 1e-3
        elif head == "simple_baseline":
            found = predict_images(session, [Image.open(path) for path in shown])
            entries = predicted(Path(run), tmp_path, shown)
            for entry, one in zip(entries, found, strict=True):
                expected = np.array(entry["keypoints"]).reshape(-1, 3)[:, :2]
                np.testing.assert_allclose(one["keypoints"][0, :, :2], expected, atol=0.02)
        else:
            assert_same_boxes(session, shown, Path(run), tmp_path)
