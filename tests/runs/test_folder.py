"""Models saved into folders and loaded again: the same, or refused with the reason."""

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import broadsight
from broadsight import add_context_broadcast, open_classifier, swap_pool
from broadsight.surgery.pooling import POOLS
from tests.compare import assert_close, randomize
from tests.refusals import refused
from tests.surgery.test_description import MODELS, SMALL, Own, vit


def there_and_back(model: nn.Module, folder) -> nn.Module:
    broadsight.save(model, folder)
    return broadsight.load(folder)


SOON = ("pool, broadcast", "light", "resized", "registered", "without edits")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SOON)) for n in MODELS])
def test_save__then_load_gives_the_same_logits(name, tmp_path):
    torch.manual_seed(0)
    model = randomize(MODELS[name]()).eval()
    again = there_and_back(model, tmp_path / "new" / "model")
    x = torch.randn(2, model.in_chans, 64, 64)
    assert_close(again(x), model(x), tolerance=1e-5)
    assert not again.training and sorted(p.name for p in (tmp_path / "new").iterdir()) == ["model"]
    assert again.state_dict().keys() == model.state_dict().keys()
    theirs = timm.create_model(f"local-dir:{tmp_path}/new/model", pretrained=True).eval()
    assert_close(theirs(x), model(x), "timm", 1e-5)


# Every pool and every kind now, every pair in `make test-slow`.
PAIRS = [(*pool, *kind) for pool in enumerate(POOLS) for kind in enumerate(("cb", "scaled", "gate", "hybrid"))]
PAIRS = [pytest.param(pool, kind, marks=[pytest.mark.slow] * (a % 4 != b)) for a, pool, b, kind in PAIRS]


@pytest.mark.parametrize(("pool", "kind"), PAIRS)
def test_save__every_pool_with_every_kind_in_both_orders(pool, kind, tmp_path):
    how = SMALL if pool in ("map", "map-light") else dict(groups=2, dim=24) if pool == "ga" else {}
    first = swap_pool(add_context_broadcast(vit(img_size=32, depth=4), kind, position="front"), pool, **how)
    second = add_context_broadcast(swap_pool(vit(img_size=32, depth=4), pool, **how), kind, branch="attn")
    x = torch.randn(2, 3, 32, 32)
    for place, model in enumerate((first, second)):
        model = randomize(model).eval()
        assert_close(there_and_back(model, tmp_path / str(place))(x), model(x), tolerance=1e-5)


def test_save__keeps_arguments_precision_labels_and_how_images_are_prepared(tmp_path):
    model = add_context_broadcast(vit(img_size=64, drop_rate=0.1, drop_path_rate=0.2, global_pool="avg"))
    model = randomize(model).to(torch.bfloat16).train()
    model.pretrained_cfg |= dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=0.7, interpolation="bilinear")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = torch.get_rng_state()
    broadsight.save(model, tmp_path / "model", labels=["a", "b", "c"])
    again = broadsight.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)  # nobody's random numbers are used up
    assert model.training and all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(value.dtype == state[key].dtype for key, value in again.state_dict().items())
    assert again.blocks[-1].drop_path1.drop_prob == model.blocks[-1].drop_path1.drop_prob > 0
    kept = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_pct=0.7, interpolation="bilinear")
    assert again.pretrained_cfg.items() >= {**kept, "label_names": ("a", "b", "c"), "num_classes": 3}.items()
    classifier = open_classifier(tmp_path / "model", device="cpu")
    assert classifier.labels == ("a", "b", "c") and classifier.transforms.mean == (0.1, 0.2, 0.3)
    assert_close(again(torch.ones(1, 3, 64, 64).bfloat16()), model.eval()(torch.ones(1, 3, 64, 64).bfloat16()))
    again = there_and_back(again, tmp_path / "again")
    assert again.pretrained_cfg["label_names"] == ("a", "b", "c")


def test_save__keeps_a_model_for_any_size_and_weights_that_are_shared(tmp_path):
    model = randomize(swap_pool("test_vit", "map", num_classes=3, **SMALL)).eval()
    model.backbone.blocks[0].norm1.weight = model.backbone.blocks[1].norm1.weight
    x = torch.randn(1, 3, 48, 96)
    assert_close(there_and_back(model, tmp_path / "model")(x), model(x), tolerance=1e-5)


def broadcasting(change, **how):
    model = add_context_broadcast(vit(img_size=64), **how)
    change(model, next(m for m in model.modules() if hasattr(m, "context_broadcast")))
    return model


def negate(model, place):
    forward = model.forward
    model.forward = lambda x: -forward(x)


OTHER = "all its layers are there, but it answers otherwise"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Own, "Own is not a model that timm makes by a name; or keep its state_dict"),
        (lambda: nn.Linear(2, 2), "Linear is not a model that timm makes"),
        (lambda: "test_vit", "model is a str; expected a model"),
        (lambda: vit(act_layer=nn.ReLU), "its argument act_layer=.*ReLU.* cannot be written down; give timm a name"),
        (lambda: vit(features_only=True), "features_only=True and gives no classes"),
        (lambda: vit().to("meta"), "cls_token is on the meta device; load some first"),
        (lambda: timm.create_model("dense_model", head="semantic_fpn", backbone="test_resnet", num_classes=2), "dense"),
        (lambda: broadcasting(lambda m, p: setattr(m.blocks[0].mlp, "act", nn.ReLU())), r"mlp.act is ReLU\(\), expect"),
        (lambda: broadcasting(lambda m, p: setattr(m, "head", nn.Linear(64, 9))), "head is Linear.*out_features=9"),
        (lambda: broadcasting(lambda m, p: setattr(m, "blocks", m.blocks[:3])), "blocks.3 is missing, expected Block"),
        (lambda: broadcasting(lambda m, p: delattr(p, "context_broadcast")), "context_broadcast is missing, expected"),
        (lambda: broadcasting(lambda m, p: setattr(p.context_broadcast, "kind", "gate")), "'gate'.*expected.*'cb'"),
        (lambda: broadcasting(lambda m, p: p._forward_hooks.clear()), OTHER),
        (lambda: broadcasting(lambda m, p: setattr(p.context_broadcast, "class_token", False), kind="gate"), OTHER),
        (lambda: broadcasting(negate), OTHER),
    ],
)
def test_save__refuses_what_is_not_what_it_says(make, reason, tmp_path):
    refused(reason, lambda: broadsight.save(make(), tmp_path / "model"))
    assert not list(tmp_path.iterdir())


def test_save__sees_what_the_weights_hide(tmp_path):
    """A classifier of zeros, as some begin with, hides in the logits what a hook does."""
    model = broadcasting(lambda m, place: place._forward_hooks.clear())
    plain = add_context_broadcast(vit(img_size=64))
    for one in (model, plain):
        nn.init.zeros_(one.head.weight)
    refused("it answers otherwise", broadsight.save, model, tmp_path / "model")
    broadsight.save(plain, tmp_path / "plain")


def test_save__leaves_what_is_there_and_nothing_half_written(tmp_path, monkeypatch):
    model = vit()
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    words = "full is there already and not empty"
    refused(words, broadsight.save, model, tmp_path / "full", error=FileExistsError)
    refused("2 labels for a model of 3 classes", broadsight.save, model, tmp_path / "new", labels=["a", "b"])
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr("broadsight.runs.folder.write_text", fail)
        refused("No space left", broadsight.save, model, tmp_path / "new", error=OSError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    broadsight.save(model, tmp_path / "empty")
    assert sorted(p.name for p in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    return broadsight.save(swap_pool("test_resnet", "gap", num_classes=3), folder)


def changed(saved, folder, **changes):
    """A copy of the folder with other entries in config.json."""
    folder.mkdir(exist_ok=True)
    config = json.loads((saved / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(saved / "model.safetensors"), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architecture="hf-hub:somebody/model"), "names the model 'hf-hub:somebody/model'"),
        (dict(architecture="dense_model", model_args={}), "holds a dense model"),
        (dict(broadsight={"task": "detect"}), "holds a dense model"),
        (dict(architecture="test_resnet", model_args={}), "another model|cannot be made"),
        (dict(num_classes=5), "1 of another shape|2 of another shape"),
        (dict(model_args={"backbone": "test_resnet", "pool": "nap"}), "unknown pool 'nap'"),
        (dict(model_args={"backbone": "test_resnet", "checkpoint_path": "x"}), "'checkpoint_path', which a stored"),
        (dict(pretrained_cfg=None), "has no pretrained_cfg"),
    ],
)
def test_load__refuses(saved, tmp_path, changes, message):
    refused(message, broadsight.load, changed(saved, tmp_path / "model", **changes))


def test_load__says_what_is_missing_or_damaged_and_takes_no_weights_from_elsewhere(saved, tmp_path):
    refused("is no folder", broadsight.load, tmp_path / "absent", error=FileNotFoundError)
    folder = changed(saved, tmp_path / "model")
    (folder / "config.json").write_text("{")
    refused("config.json is damaged", broadsight.load, folder)
    folder = changed(saved, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")  # a pickle is not even looked at
    refused("holds no model.safetensors", broadsight.load, folder, error=FileNotFoundError)
    described = json.loads((saved / "config.json").read_text())["pretrained_cfg"]
    sources = dict(url="http://localhost:1/x", hf_hub_id="a/b", file="/etc/passwd", custom_load=True, state_dict={})
    model = broadsight.load(changed(saved, tmp_path / "model", pretrained_cfg=described | sources))
    assert not {"url", "hf_hub_id", "file", "state_dict"} & {k for k, v in model.pretrained_cfg.items() if v}


@pytest.mark.slow
def test_fresh_process__gives_the_same_logits(tmp_path):
    """Nothing of the process that saved is needed: only the folder and this package."""
    torch.manual_seed(0)
    model = randomize(MODELS["pool, broadcast"]()).eval()
    broadsight.save(model, tmp_path / "ours")
    timm.models.save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    x = torch.randn(2, model.in_chans, 64, 64)
    save_file({"x": x, "y": model(x).detach()}, tmp_path / "answers.safetensors")
    script = f"""
import broadsight, timm, torch
from safetensors.torch import load_file
kept = load_file({str(tmp_path / "answers.safetensors")!r})
for folder in ("ours", "timm"):
    place = {str(tmp_path)!r} + "/" + folder
    for model in (broadsight.load(place), timm.create_model("local-dir:" + place, pretrained=True).eval()):
        torch.testing.assert_close(model(kept["x"]), kept["y"])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
