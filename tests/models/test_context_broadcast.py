"""The models of the context broadcasting paper: timm's, with context in their blocks and all else as timm has it."""

from functools import cache, partial
from itertools import product

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import get_pretrained_cfg, save_for_hf
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import broadsight
from broadsight.layers import ContextBroadcast
from broadsight.models.context_broadcast import ALIASES, MODELS
from tests.compare import assert_close, randomize
from tests.refusals import refused

NAMES = timm.list_models(module="context_broadcast")
# Few blocks, of every kind that the base has; and how many of them see the image's tokens.
SHRUNK = dict(
    vit_tiny_cb=dict(depth=3),
    vit_small_cb_s=dict(depth=3),
    deit_tiny_distilled_cb_s=dict(depth=3),
    deit_tiny_distilled_patch16_224_cb=dict(depth=3),
    twins_pcpvt_small_cb=dict(depths=(1, 1, 1, 1), embed_dims=(16, 16, 20, 24), num_heads=(1, 2, 2, 2)),
    pvt_v2_b0_cb_s=dict(depths=(1, 1, 1, 1)),
    pvt_small_cb_s=dict(depths=(1, 1, 1, 1), dims=(16, 16, 20, 24), heads=(1, 2, 2, 2)),
    localvit_tiny_cb=dict(depth=3),
    swin_tiny_cb=dict(depths=(1, 1, 2, 1), embed_dim=24),
)
each = pytest.mark.parametrize("name", SHRUNK)


@cache
def _template(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomize(timm.create_model(name, num_classes=7, **SHRUNK[name])).eval()


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def broadcasts(model: nn.Module) -> dict[str, ContextBroadcast]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ContextBroadcast)}


def test_names__of_the_design_and_of_timm():
    wanted = {"pvt_v2_b0_cb", "swin_tiny_cb"}
    for kind, size in product(("cb", "cb_s"), ("tiny", "small", "base")):
        wanted |= {f"vit_{size}_{kind}", f"vit_{size}_patch16_224_{kind}"}
        wanted |= {f"deit_{size}_distilled_{kind}", f"deit_{size}_distilled_patch16_224_{kind}"}
    assert wanted <= set(NAMES) == {*MODELS, *ALIASES}
    assert not set(NAMES) & {model.base for model in MODELS.values()}  # timm's own stay timm's


@pytest.mark.parametrize(
    ("name", "kind", "place", "channels"),
    [
        ("vit_small_cb", "cb", "mlp.fc2", 384),
        ("vit_small_patch16_224_cb_s", "scaled", "mlp.fc2", 384),
        ("vit_small_cb_attn", "cb", "attn.proj", 384),
        ("vit_small_cb_front", "cb", "mlp", 384),
        ("vit_small_cb_mid", "cb", "mlp.fc2", 1536),
        ("vit_small_cb_gate", "gate", "mlp.fc2", 384),
        ("vit_small_cb_gate_front", "gate", "mlp", 384),
        ("vit_small_cb_hybrid_attn", "hybrid", "attn.proj", 384),
        ("vit_small_cb_hybrid_mid", "hybrid", "mlp.fc2", 1536),
        ("vit_small_cb_gate_both", "gate", "attn.proj mlp.fc2", 384),
    ],
)
def test_rows__broadcast_where_the_tables_say(name, kind, place, channels):
    found = broadcasts(timm.create_model(name, device="meta"))
    places = [f"blocks.{block}.{one}.context_broadcast" for block in range(12) for one in place.split()]
    assert list(found) == places
    assert {(module.kind, module.dim, module.class_token) for module in found.values()} == {(kind, channels, True)}


@cache
def _keys(base: str) -> set[str]:
    return set(timm.create_model(base, device="meta").state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_descriptions__name_parts_that_exist(name):
    cfg = get_pretrained_cfg(name)
    assert (cfg.url, cfg.hf_hub_id, cfg.num_classes, cfg.input_size) == ("", None, 1000, (3, 224, 224))
    classifiers = (cfg.classifier,) if isinstance(cfg.classifier, str) else cfg.classifier
    keys = _keys(MODELS[ALIASES.get(name, name)].base)
    assert {f"{layer}.weight" for layer in (cfg.first_conv, *classifiers)} <= keys


@each
def test_keys__are_those_of_the_base_and_the_scales(name):
    inner = MODELS[ALIASES.get(name, name)]
    base = timm.create_model(inner.base, num_classes=7, **SHRUNK[name]).eval()
    torch.manual_seed(1)
    fresh = timm.create_model(name, num_classes=7, **SHRUNK[name]).eval()
    missing, unexpected = fresh.load_state_dict(base.state_dict(), strict=False)
    assert set(missing) == ({f"{place}.scale" for place in broadcasts(fresh)} if inner.kind == "scaled" else set())
    assert not unexpected
    x = images(2, 3, 224, 224)
    assert torch.equal(fresh(x), base(x)) == (inner.kind == "scaled")


@each
@torch.no_grad()
def test_contract__sizes_classes_channels_and_features(name):
    model = _template(name)
    assert model(images(2, 3, 160, 192)).shape == (2, 7)  # any size, whatever the base was built for
    features = model.forward_features(images(1, 3, 224, 224))
    assert_close(model.forward_head(features), model(images(1, 3, 224, 224)))
    model = timm.create_model(name, in_chans=1, num_classes=0, **SHRUNK[name]).eval()
    assert model(images(1, 1, 224, 224)).shape == (1, model.num_features)
    model.reset_classifier(3)
    assert model(images(1, 1, 224, 224)).shape == (1, 3)
    assert model.pretrained_cfg["architecture"] == name and broadcasts(model)
    model = timm.create_model(name, features_only=True, **SHRUNK[name])
    maps = model(images(1, 3, 224, 224))
    assert [x.shape[1] for x in maps] == model.feature_info.channels()
    assert [224 // x.shape[-1] for x in maps] == model.feature_info.reduction()
    assert broadcasts(model)


def test_contract__layer_decay_takes_the_scales_with_their_blocks_and_both_classifiers_learn():
    model = timm.create_model("vit_tiny_cb_s", depth=3)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    rates = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    for block in model.blocks:
        bias = block.mlp.fc2.bias
        assert rates[id(block.mlp.fc2.context_broadcast.scale)] == rates[id(bias)]
        assert rates[id(bias)][1] == 0
    model = timm.create_model("deit_tiny_distilled_cb", depth=2, num_classes=7).train()
    model.set_distilled_training(True)
    logits, distilled = model(images(2, 3, 224, 224))
    (logits + distilled).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("size", [224, 160])
@torch.no_grad()
def test_weights__a_file_of_ours_loads_at_other_sizes(tmp_path, size):
    torch.manual_seed(0)
    options = dict(depth=2, num_classes=7)
    model = randomize(timm.create_model("vit_tiny_cb_s", **options)).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    options |= dict(pretrained_cfg_overlay=dict(file=str(tmp_path / "weights.safetensors"), num_classes=7))
    loaded = timm.create_model("vit_tiny_cb_s", pretrained=True, img_size=size, **options).eval()
    assert torch.equal(*(one.blocks[1].mlp.fc2.context_broadcast.scale for one in (loaded, model)))
    x = images(1, 3, size, size)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights__a_saved_folder_loads(tmp_path):
    torch.manual_seed(0)
    model = randomize(timm.create_model("deit_tiny_distilled_cb_s", depth=2, num_classes=7)).eval()
    save_for_hf(model, tmp_path, model_args=dict(depth=2), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(1, 3, 224, 224)
    assert torch.equal(loaded(x), model(x))


def test_arguments__another_kind_place_device_or_dtype_but_no_weights():
    make = partial(timm.create_model, "vit_tiny_cb")
    model = make(depth=2, kind="scaled", branch="attn", position="mid")
    places = [f"blocks.{block}.attn.proj.context_broadcast" for block in range(2)]
    assert [(name, module.kind) for name, module in broadcasts(model).items()] == [(p, "scaled") for p in places]
    refused("unknown position 'middle'; did you mean 'mid'", make, depth=2, position="middle")
    refused("unexpected keyword argument 'bananas'", make, bananas=3)
    refused("No pretrained weights exist for vit_tiny_cb", make, error=RuntimeError, pretrained=True)
    narrow = timm.create_model("vit_tiny_cb_s", depth=1, dtype=torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in timm.create_model("vit_tiny_cb_s", device="meta").parameters())


def test_add__equals_the_registered_model():
    registered = timm.create_model("pvt_v2_b0_cb", depths=(1, 1, 1, 1)).eval()
    plain = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1)).eval()
    plain.load_state_dict(registered.state_dict())
    added = broadsight.add_context_broadcast(plain)
    with torch.no_grad():
        x = images(2, 3, 96, 64)
        assert torch.equal(added(x), registered(x))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["mid", "end"])
@pytest.mark.parametrize("name", ["vit_tiny_cb", "vit_small_cb_s", "pvt_v2_b0_cb_s", "swin_tiny_cb"])
def test_onnx__gives_the_same_numbers(name, position, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = randomize(timm.create_model(name, branch="both", position=position, **SHRUNK[name])).eval()
    path = tmp_path / "model.onnx"
    sizes = ({0: torch.export.Dim("batch", min=1, max=16)},)
    torch.onnx.export(model, (images(2, 3, 224, 224),), path, dynamo=True, dynamic_shapes=sizes)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = images(3, 3, 224, 224)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(got), model(x), tolerance=1e-4)
