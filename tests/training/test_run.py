"""Whole runs on a few small images: what they learn from, how, and what they leave behind."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from broadsight.runs.classifier import open_classifier
from broadsight.training.run import train
from broadsight.weights.loading import load_given

from .small_runs import SMALL_POOL, ask, files_in, fill, leave_run, ready, refusal, updates, without_drawing
from .small_runs import offline_hub as offline


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    without_drawing(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("data"), a=10, b=10)


@pytest.fixture(scope="module")
def colours(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("colours"), red=6, green=6, blue=6)


def config(run: Path) -> dict:
    return json.loads((run / "config.json").read_text())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("test_resnet", dict(pool="map", pool_args=SMALL_POOL)),
        ("test_vit", dict(broadcast="scaled", broadcast_args={"branch": "both"})),
        ("test_vit", dict(changes=dict(eval_size=64))),
        ("vit_tiny_patch16_224", dict(model_args=dict(depth=1, embed_dim=24, num_heads=3), changes=dict(eval_size=64))),
        ("vit_tiny_cb", dict(model_args=dict(depth=1, embed_dim=24, num_heads=3))),
    ],
)
def test_train__run_answers_as_it_did(data, tmp_path, model, options):
    out = tmp_path / "run"
    prepared = ready(ask(data, model=model, out=str(out), **options))
    engine = prepared.engine
    engine.folder.create(prepared.description)
    engine.folder.keep_best(engine.plain)
    again = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    x = torch.randn(2, *again.pretrained_cfg["input_size"])
    torch.testing.assert_close(again(x), engine.plain.eval()(x))
    torch.testing.assert_close(open_classifier(out, device="cpu").model(x), engine.plain(x))


def test_train__every_kind_of_image(tmp_path):
    """Grey, palette, transparent, CMYK, 16 bits and turned photographs, and some that are broken."""
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 255, (30, 50, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65535, (30, 50), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    modes = {"rgb.png": "RGB", "grey.png": "L", "palette.gif": "P", "transparent.png": "RGBA", "print.jpg": "CMYK"}
    for folder in (tmp_path / "data" / "a", tmp_path / "data" / "b"):
        folder.mkdir(parents=True)
        for name, mode in modes.items():
            colour.convert(mode).save(folder / name)
        deep.save(folder / "deep.png")
        colour.save(folder / "turned.jpg", exif=exif)
    (tmp_path / "data" / "a" / "broken.png").write_bytes(b"no image")
    (tmp_path / "data" / "a" / "broken2.jpg").write_bytes(b"")
    (tmp_path / "data" / "empty").mkdir()
    request = ask(tmp_path / "data", val=str(tmp_path / "data"), out=str(tmp_path / "run"), changes=dict(batch_size=2))
    outcome = train(request)
    assert sorted(outcome.progress.skipped) == ["a/broken.png", "a/broken2.jpg"]
    assert json.loads((tmp_path / "run" / "skipped.json").read_text()) == outcome.progress.skipped
    assert any("empty" in note for note in outcome.notes)
    assert config(tmp_path / "run")["label_names"] == ["a", "b"]

    strict = replace(request, strict=True, out=str(tmp_path / "strict"))
    said = refusal(lambda: train(strict), (ValueError, RuntimeError))
    assert said.startswith("a/broken") and "cannot be read" in said and "--strict" in said
    assert said.count("a/broken") == 1
    # A class without validation images
    fill(tmp_path / "other" / "train", a=4, b=4, c=4)
    fill(tmp_path / "other" / "val", a=2, b=2)
    outcome = train(ask(tmp_path / "other", out=str(tmp_path / "three")))
    assert any("without images to validate: c" in note for note in outcome.notes)
    assert config(tmp_path / "three")["num_classes"] == 3


@pytest.mark.parametrize("pool", [None, "gap"])
def test_accumulation__is_one_batch(data, pool):
    """Of a model whose images do not see each other."""

    def weights_after(count, **changes):
        sgd = dict(batch_size=8, optimizer="sgd", lr=0.1, clip_norm=None, drop_rate=0.0) | changes
        prepared = ready(ask(data, model="test_convnext", pool=pool, changes=sgd))
        updates(prepared, count)
        return {name: value.clone() for name, value in prepared.engine.plain.state_dict().items()}

    whole, parts, start = weights_after(2), weights_after(2, accumulate=2), weights_after(0)
    moved = max((whole[name] - start[name]).abs().max() for name in whole)
    apart = max((whole[name] - parts[name]).abs().max() for name in whole)
    assert moved > 1e-3 and apart < 1e-4 * moved
    work = ready(ask(data, changes=dict(batch_size=8, accumulate=4))).engine.work
    work.begin_epoch(0, 0)
    assert [len(work.next_batch().labels) for _ in range(work.accumulate)] == [2, 2, 2, 2]


def test_precision(data, tmp_path, monkeypatch):
    prepared = ready(ask(data, changes=dict(precision="bf16")))
    kinds = []
    prepared.engine.plain.fc.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    (loss,) = updates(prepared, 1)
    assert kinds == [torch.bfloat16]
    assert {p.dtype for p in prepared.engine.plain.parameters()} == {torch.float32}
    (single,) = updates(ready(ask(data)), 1)
    assert loss == pytest.approx(single, rel=0.05) and loss != single
    assert train(ask(data, changes=dict(precision="bf16"), out=str(tmp_path / "run"))).progress.finished
    prepared = ready(ask(data, changes=dict(channels_last=True)))
    assert prepared.engine.plain.conv1[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert updates(prepared, 1) == pytest.approx([single], rel=1e-4)
    # fp16 needs a GPU, unless a recipe asks for it
    request = ask(data, changes=dict(precision="fp16"), out=str(tmp_path / "half"))
    assert refusal(lambda: train(request)) == "precision=fp16 needs a GPU; use precision=bf16 or fp32"
    assert not (tmp_path / "half").exists()
    train(ask(data, recipe="deit-300", out=str(tmp_path / "half")))
    assert config(tmp_path / "half")["broadsight"]["recipe"]["precision"] == "fp32"
    # what auto is, is decided once, printed, and kept
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    done = train(ask(data, precision="auto", device="cpu", out=str(tmp_path / "auto")))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    train(ask(data, precision="auto", device="cpu", out=str(tmp_path / "auto"), resume=True))
    stored = config(tmp_path / "auto")["broadsight"]
    assert (stored["recipe"]["precision"], stored["settings"]["changes"]["precision"]) == ("bf16", "auto")
    assert "computes in bf16 (auto)" in done.notes
    single = train(ask(data, precision="auto", device="cpu", out=str(tmp_path / "single")))
    assert "computes in fp32 (auto)" in single.notes and "fp32" in str(config(tmp_path / "single")["broadsight"])
    assert "precision given twice" in refusal(lambda: ask(data, precision="bf16", changes=dict(precision="fp32")))


@pytest.mark.slow
def test_compile(data, tmp_path):
    compiled = updates(ready(ask(data, changes=dict(compile=True))), 2)
    assert compiled == pytest.approx(updates(ready(ask(data)), 2), rel=1e-3)
    outcome = train(ask(data, changes=dict(compile=True), out=str(tmp_path / "run")))
    names = load_file(outcome.folder / "model.safetensors").keys()
    assert names == timm.create_model("test_resnet").state_dict().keys()


def test_grey(data, tmp_path):
    out = tmp_path / "run"
    train(ask(data, model_args=dict(in_chans=1), changes=dict(auto_augment="rand-m5-mstd0.5-inc1"), out=str(out)))
    model = timm.create_model(f"local-dir:{out}", pretrained=True)
    assert model.conv1[0].weight.shape[1] == 1 and model.pretrained_cfg["mean"] in ((0.5,), [0.5])
    assert config(out)["pretrained_cfg"]["input_size"] == [1, 32, 32]
    changes = dict(distill="hard", teacher=str(out))
    losses = updates(ready(ask(data, model_args=dict(in_chans=1), changes=changes)), 1)
    assert losses[0] > 0


def test_size__of_images_scenes_vits_and_broken_images(data, tmp_path):
    for size in ("image_size", "eval_size"):  # the command with --resume added is the same run, whoever decides a size
        request = ask(data, out=str(tmp_path / size), changes={size: None})
        train(request)
        assert train(replace(request, resume=True)).progress.finished
    for side, expected in {20: 64, 64: 64, 65: 96, 150: 160, 300: 224}.items():
        data = fill(tmp_path / f"{side}", size=side, a=2, b=2)
        recipe = ready(ask(data, changes=dict(image_size=None, batch_size=2))).engine.recipe
        assert (recipe.image_size, recipe.eval_size) == (expected, expected)
    recipe = ready(ask("scenes:8", changes=dict(image_size=None, batch_size=2))).engine.recipe
    assert recipe.image_size == 64
    model = ready(ask("scenes:8", model="test_vit", changes=dict(image_size=48, batch_size=2))).engine.plain
    assert model.pos_embed.shape[1] == 1 + 9
    for file in data.rglob("*.png"):
        file.write_text("x")
    said = refusal(lambda: ready(ask(data, changes=dict(image_size=None, batch_size=2))))
    assert said.startswith("none of ") and "can be read" in said


def test_fit_batch(data, colours):
    changes = dict(epochs=1, image_size=32)
    fitted = ready(replace(ask(data), set=changes))
    assert fitted.engine.recipe.batch_size == 18 // 4
    assert any("batch of 4 instead of 64, since there are 18 training images" in note for note in fitted.notes)
    assert ready(ask(data, changes=dict(batch_size=16))).engine.recipe.batch_size == 16
    # Even where images are mixed: 15 images to train on, a quarter of which are 3
    assert ready(replace(ask(colours), set=changes | dict(mixup=0.5))).engine.work.batch % 2 == 0


def test_init__from_a_run_or_a_file(data, colours, tmp_path):
    folder, model = leave_run(tmp_path / "earlier")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "weights.pth")
    for source in (folder, folder / "model.safetensors", tmp_path / "weights.pth"):
        found = ready(ask(data, init=str(source))).engine.plain.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    # It is fine-tuning without timm's weights
    recipe = ready(ask(data, init=str(folder), recipe=None)).engine.recipe
    assert recipe.layer_decay == 0.75 and recipe.pretrained is False
    # Of other classes it keeps the backbone
    for number, options in enumerate(({}, dict(pool="map", pool_args=SMALL_POOL), dict(pool="gap"))):
        earlier = ready(ask(data, out=str(tmp_path / f"{number}"), **options))
        earlier.engine.folder.create(earlier.description)
        earlier.engine.folder.keep_best(earlier.engine.plain)
        before = earlier.engine.plain.state_dict()
        found = ready(ask(colours, init=str(tmp_path / f"{number}"), **options)).engine.plain.state_dict()
        assert found.keys() == before.keys()
        others = {name for name in found if found[name].shape != before[name].shape}
        ends = earlier.engine.plain.pretrained_cfg["classifier"]
        ends = (ends,) if isinstance(ends, str) else tuple(ends)
        assert others and all(name.startswith(ends) for name in others)
        assert all(torch.equal(found[name], before[name]) for name in found.keys() - others)


def test_init__refused_as_are_weights_that_cannot_be_had(data, tmp_path, monkeypatch):
    folder, _ = leave_run(tmp_path / "vit", "test_vit")
    (tmp_path / "empty").mkdir()
    torch.save([1, 2], tmp_path / "list.pth")
    before = files_in(tmp_path)
    said = refusal(lambda: ready(ask(data, init=str(folder), out=str(tmp_path / "run"))))
    assert "holds weights of another model" in said and "missing" in said
    said = refusal(lambda: ready(ask(data, init=str(tmp_path / "empty"))), FileNotFoundError)
    assert "holds no model.safetensors; give a run folder or a file of weights" in said
    said = refusal(lambda: ready(ask(data, init=str(tmp_path / "nowhere"))), FileNotFoundError)
    assert "nowhere is not a file" in said and "released" not in said
    said = refusal(lambda: load_given(timm.create_model("test_resnet"), str(tmp_path / "list.pth")))
    assert "holds no weights; expected tensors by name" in said
    place = ask(data, model=f"local-dir:{folder}", out=str(tmp_path / "run"))  # which no config.json can name
    assert "--init" in refusal(lambda: ready(place))
    assert files_in(tmp_path) == before
    offline(monkeypatch)
    said = refusal(lambda: ready(ask(data, changes=dict(pretrained=True))), Exception)
    assert said.startswith("the pretrained weights of test_resnet cannot be had: ") and "\n" not in said


def test_pool__light_is_refused_and_groups_get_distillation_tokens(data, tmp_path):
    """A light model only infers: what to do is known before the first image."""
    light = ask(data, pool="map-light", pool_args=SMALL_POOL, out=str(tmp_path / "run"))
    assert "map-light only infers" in refusal(lambda: train(light)) and not (tmp_path / "run").exists()
    changes = dict(distill="hard", teacher=str(leave_run(tmp_path / "teacher")[0]))
    for pool, small in dict(ga=dict(groups=2, dim=24), cap=dict(heads=1)).items():
        assert updates(ready(ask(data, pool=pool, pool_args=small, changes=changes)), 1)


def test_out__is_numbered(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"{data.name}-test_resnet"
    first = ready(ask(data)).engine.folder.path
    assert first == Path("runs") / f"{name}-1"
    for other in ("1", "7", "mine", "map-9", "v2"):
        (tmp_path / "runs" / f"{name}-{other}").mkdir(parents=True)
    assert ready(ask(data)).engine.folder.path == Path("runs") / f"{name}-8"
