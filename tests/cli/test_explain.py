"""`broadsight explain` as somebody types it: what it writes, and what it says if something is wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.cli.main import main
from broadsight.data.loading import Transforms
from broadsight.data.scenes import Scenes, draw_scene
from broadsight.explanation.inside import look_inside
from broadsight.explanation.overlay import overlay
from broadsight.explanation.run import Wanted, class_index, explain_images, look_at, seen_places, unique_stems
from broadsight.runs.classifier import open_classifier
from tests.refusals import refused

NO_IMAGE = "not an image, or of a kind that is not read here; expected JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF"
VIT = ["test_vit", "--no-pretrained", "--size", "32", "--model-args", "num_classes=4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two images of the same name, and a text that is called like one."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one/dog.png", "two/dog.jpg")):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(draw_scene(number, size=40).image).save(tmp_path / name)
    (tmp_path / "one" / "text.png").write_text("no image")
    return tmp_path


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return open_classifier("test_vit", pretrained=False, model_args={"num_classes": 4}, size=32)


def complaint(capsys, *arguments):
    assert main(["explain", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("broadsight: ")]
    return line


def test_writes_sheets_maps_numbers_and_a_record(folder, capsys):
    options = ["--kinds", "gradcam,attention", "--class", "2", "--singles", "--raw", "--out", "new/there"]
    assert main(["explain", *VIT, "one", "two", *options]) == 0
    said = capsys.readouterr().err
    assert "test_vit is untrained: the weights are random" in said
    assert "one/text.png cannot be read: not an image" in said
    out = folder / "new" / "there"
    files = {"dog", "dog-2", "dog-2.npz", "dog-2.png", "dog.npz", "dog.png", "explanation.json"}
    assert {path.name for path in out.iterdir()} == files
    record = json.loads((out / "explanation.json").read_text())
    assert record["command"].startswith("broadsight explain test_vit")
    assert record["model"]["weights"] == "random" and record["model"]["kinds"] == ["gradcam", "attention"]
    assert record["failed"] == {"one/text.png": NO_IMAGE}
    assert record["settings"]["target"] == "2" and record["versions"]["torch"] and not record["interrupted"]
    first = record["images"][0]
    assert (first["file"], first["sheet"]) == ("one/dog.png", "dog.png")
    assert first["explained"] == {"class": "2", "index": 2} and len(first["predictions"]) == 4
    assert sum(one["probability"] for one in first["predictions"]) == pytest.approx(1, abs=1e-4)
    arrays = np.load(out / "dog.npz")
    assert set(arrays) == {"image", *(look["array"] for look in first["looks"])}
    for look in first["looks"]:
        values = arrays[look["array"]]
        assert list(values.shape) == look["size"] and values.max() == pytest.approx(look["largest"], rel=1e-4)
        assert Image.open(out / look["file"]).size == (32, 32)
    assert record["layers"]["gradcam"] == [look["layer"] for look in first["looks"] if look["kind"] == "gradcam"]


def test_on_scenes_if_no_image_is_given_and_of_grey_models(folder, capsys):
    assert main(["explain", *VIT, "--kinds", "gradcam", "--depth", "last", "--json"]) == 0
    printed = capsys.readouterr()
    assert "note: on 3 built-in scenes, which are drawn; give IMAGE for others" in printed.err
    record = json.loads(printed.out)
    assert record["data"] == "scenes:3" and [len(entry["looks"]) for entry in record["images"]] == [1, 1, 1]
    made = folder / "explanations" / "test_vit-1"
    assert json.loads((made / "explanation.json").read_text()) == record
    assert main(["explain", *VIT, "scenes:1", "--kinds", "gradcam"]) == 0
    assert (folder / "explanations" / "test_vit-2" / "000000.png").is_file()
    # Of grey models
    arguments = ["test_resnet", "--no-pretrained", "--model-args", "num_classes=3", "in_chans=1", "--size", "32"]
    assert main(["explain", *arguments, "two/dog.jpg", "--raw", "--out", "out"]) == 0
    assert np.load("out/dog.npz")["image"].shape == (32, 32)
    assert main(["explain", *arguments, "scenes:1", "--out", "drawn"]) == 0


def test_looks__are_those_of_the_model(vit):
    image = Scenes(1, size=40).open(0)
    seen = look_at(vit, image, target=1)
    expected = look_inside(vit.model, seen.tensor, target=1)
    for one, other in zip(seen.looks, expected, strict=True):
        assert (one.kind, one.layer, one.depth) == (other.kind, other.layer, other.depth)
        assert torch.equal(one.values, other.values)
    logits = vit.logits(seen.tensor)[0]
    assert seen.places[0] == int(logits.argmax())
    assert seen.probabilities[0] == pytest.approx(float(logits.softmax(0).max()))
    assert seen.image.size == overlay(seen.image, seen.looks[0]).size == (32, 32)


def test_layers_and_depths(vit):
    image = Scenes(1, size=40).open(0)

    def layers(wanted: Wanted) -> list[str]:
        return [one.layer for one in look_at(vit, image, wanted).looks]

    every = layers(Wanted(("gradcam",)))
    assert layers(Wanted(("gradcam",), depths=("1", "last"))) == [every[0], every[-1]]
    chosen = look_at(vit, image, Wanted(layers=("blocks.1",))).looks  # the module and all in it
    assert {one.layer for one in chosen} == {"blocks.1", "blocks.1.attn"} and {one.depth for one in chosen} == {1}
    assert set(layers(Wanted(layers=("*.attn",)))) == {f"blocks.{n}.attn" for n in range(len(vit.model.blocks))}
    (own,) = look_at(vit, image, Wanted(layers=("blocks.2.norm1",))).looks
    assert (own.kind, own.layer) == ("gradcam", "blocks.2.norm1") and own.values.shape == (2, 2)


def test_query__pixels_of_the_image_in_what_the_model_sees():
    transforms = Transforms(32, interpolation="bilinear", crop_pct=0.8)  # 160 x 80 becomes 80 x 40, of which 32 x 32
    assert transforms.view((160, 80)) == (48, 8, 112, 72)
    assert seen_places(transforms, (160, 80), [(48, 8), (80, 40)], "it") == [(-0.25, -0.25), (15.75, 15.75)]
    for size, (x, y) in (((60, 44), (35, 12)), ((40, 97), (31, 60)), ((33, 33), (9, 22))):
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        pixels[y - 2 : y + 3, x - 2 : x + 3] = 255
        seen = np.asarray(transforms.build(False)(Image.fromarray(pixels)))[0].astype(float)
        centre = [(seen * place).sum() / seen.sum() for place in np.mgrid[:32, :32][::-1]]
        assert seen_places(transforms, size, [(x, y)], "it")[0] == pytest.approx(centre, abs=0.25)
    for place, words in (
        ((160, 3), "outside it, which is 160x80; expected x from 0 to 159, y from 0 to 79"),
        ((47, 9), "outside what the model sees of it, which is 160x80; expected x from 48 to 111, y from 8 to 71"),
    ):
        refused(f"query {place[0]},{place[1]} is {words}", seen_places, transforms, (160, 80), [place], "it")


def test_query__maps_numbers_and_record(folder, capsys):
    Image.new("RGB", (80, 40)).save(folder / "wide.png")
    options = ["--query", "30,20", "--kinds", "query", "--query=50,10;30,20", "--raw", "--singles", "--depth", "last"]
    assert main(["explain", *VIT, "wide.png", "one/dog.png", *options, "--out", "out"]) == 0
    said = capsys.readouterr().err
    assert "broadsight: query 50,10 is outside one/dog.png, which is 40x40; expected x from 0 to 39, y from 0" in said
    record = json.loads((folder / "out" / "explanation.json").read_text())
    assert record["settings"]["query"] == [[30, 20], [50, 10]] and list(record["failed"]) == ["one/dog.png"]
    (entry,) = record["images"]
    assert [look["title"] for look in entry["looks"]] == ["(30,20)", "(50,10)"]
    assert record["layers"] == {"query": ["blocks.5.attn"]} and entry["looks"][0]["mark"] == pytest.approx(
        [(30.5 - 20.606) / 38.788, 20.5 / 38.788], abs=1e-4
    )
    arrays = np.load(folder / "out" / "wide.npz")
    for look in entry["looks"]:
        heads = arrays[look["array"] + "-heads"]
        assert heads.shape == (2, 2, 2) and heads.mean(0) == pytest.approx(arrays[look["array"]], abs=1e-6)
    assert (folder / "out" / "wide" / "query-06-30-20.png").is_file()


def test_files_are_complete_or_not_there_and_what_is_done_when_interrupted_is_kept(vit, folder, monkeypatch):
    def broken(self, *_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(Image.Image, "save", broken)
        explain_images(vit, Scenes(1, size=40), folder / "out", Wanted(("gradcam",)))
    assert list((folder / "out").iterdir()) == []
    from broadsight.explanation import run as explaining

    done = []

    def once(*arguments, **options):
        if done:
            raise KeyboardInterrupt
        done.append(arguments)
        return look_at(*arguments, **options)

    monkeypatch.setattr(explaining, "look_at", once)
    assert main(["explain", *VIT, "scenes:3", "--kinds", "gradcam", "--out", "out"]) == 130
    record = json.loads((folder / "out" / "explanation.json").read_text())
    assert record["interrupted"] and [entry["sheet"] for entry in record["images"]] == ["000000.png"]


def test_unique_stems_and_class_index(vit):
    stems = unique_stems(["a/x.png", "b/x.jpg", "x-2.png", "X.gif", "explanation.png", "c/x.png"])
    assert stems == ["x", "x-2", "x-2-2", "X-3", "explanation-2", "x-4"]
    assert len({stem.casefold() for stem in stems}) == 6
    assert class_index(vit, "3") == 3
    named = open_classifier("test_resnet", pretrained=False)
    assert class_index(named, " Golden Retriever") == 207 and class_index(named, "0") == 0
    cranes = replace(vit, labels=("crane", "dog", "Crane", "cat"))
    refused("2 classes are called crane; give the number: 0, 2", class_index, cranes, "crane")
    refused("has no class 'goldn retriever'; nearest: golden retriever", class_index, named, "goldn retriever")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--kinds", "super-tokens"], "test_vit has no super-tokens to look at; it has gradcam, attention; "),
        (["one", "--kinds", "atention"], "unknown kind 'atention'; did you mean 'attention'? expected one of gradcam,"),
        (["one", "--kinds", ","], "--kinds ',' names nothing"),
        (["one", "--kinds", "query"], "--kinds query asks for places; expected broadsight explain --query X,Y"),
        (["one", "--query", "12"], "--query 12: expected X,Y, pixels from the image's top left, such as 120,80"),
        (["one", "--query", "1,2;3"], "--query 3: expected X,Y"),
        (["one", "--query", "1,-2"], "--query 1,-2: expected X,Y"),
        (["one", "--query", "1,2", "--kinds", "gradcam"], "--query is for the kind query; this is --kinds gradcam"),
        (["two", "--query", "90,8"], "query 90,8 is outside two/dog.jpg, which is 40x40; expected x from 0 to 39, y"),
        (
            ["two", "--query", "9,8", "--layers", "blocks.1.norm1"],
            "no place asks in these layers of test_vit; such as blocks.0.attn,",
        ),
        (["one", "--class", "4"], "test_vit has no class '4'; expected a name such as 0, or a number from 0 to 3"),
        (["two", "--layers", "blocks.77"], "--layers blocks.77: nothing is looked at there in test_vit; such as block"),
        (["two", "--depth", "0"], "--depth 0; expected numbers from 1, or last"),
        (["two", "--depth", "99"], "--depth 99: there is no such layer; expected 1 to "),
        (["nowhere.png"], "no such file or folder: nowhere.png"),
        (["scenes:0"], "scenes:0; expected scenes:N, up to 1000"),
        (["scenes:9999"], "scenes:9999; expected scenes:N, up to 1000"),
        (["scenes:2", "one"], "scenes together with other images; expected one of the two"),
        (["one", "--out", "two"], "--out two exists and is not an empty folder; choose another, nothing was changed"),
        (["one", "--json", "one/dog.png"], "--json one/dog.png, which is named like an image"),
        (["one", "--threads", "0"], "--threads 0; expected 1 or more"),
    ],
)
def test_refused(arguments, message, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert message in complaint(capsys, *VIT, *arguments)
    assert sorted(folder.rglob("*")) == before


def test_no_image_at_all_and_dense_runs(folder, capsys):
    line = complaint(capsys, "test_resnet", "--no-pretrained", "two", "--query", "3,4")
    assert "test_resnet has no query to look at; it has gradcam; query: models with attention among places" in line
    line = complaint(capsys, *VIT, "one/text.png", "--out", "out")
    assert line == f"broadsight: one/text.png cannot be read: {NO_IMAGE}"
    assert not (folder / "out").exists()
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps({"architecture": "x", "broadsight": {"task": "detect"}}))
    line = complaint(capsys, "run", "one")
    assert "run is a run of --task detect; explain looks into classifiers" in line and "broadsight predict run" in line
