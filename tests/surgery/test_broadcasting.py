"""add_context_broadcast over timm's architectures, ours and others': values, weights, tools, refusals."""

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
import yaml
from timm.layers import create_feature_extractor
from timm.models import MlpMixer
from torch import Tensor, nn
from torch.export import Dim

from broadsight import add_context_broadcast, fuse, swap_pool
from broadsight.inspection.branches import find_branches
from broadsight.layers import ContextBroadcast
from broadsight.layers.context_broadcast import KINDS
from broadsight.layers.kernels import slices
from broadsight.models import MAT, EMSNet, PartialFormer, STViT
from tests.compare import assert_close, assert_threads_apart, randomize
from tests.inspection.foreign_blocks import FOREIGN, MORE, SIDE, Residual, TokenModel
from tests.inspection.test_branches import COUNTS
from tests.inspection.timm_models import SHRUNK, created
from tests.inspection.timm_models import images as timm_images
from tests.refusals import refused

POSITIONS = ("front", "mid", "end")
OWN = {
    "stvit": lambda: STViT((16, 24, 32, 40), (1, 1, 1, 1), (1, 2, 2, 2), layer_scale=(None, 0.5, None, 0.5)),
    "stvit_plain": lambda: STViT((16, 24, 32, 40), (1, 1, 1, 1), (1, 2, 2, 2)),
    "emsnet": lambda: EMSNet((16, 24, 32, 64), (1, 1, 1, 1)),
    "mat": lambda: MAT(16, (1, 1, 1, 1), (2, 4), hidden=24),
    "partialformer": lambda: PartialFormer(16, (1, 1, 1, 1), (1, 2, 2, 4), hidden=24),
}
# As small as the equations allow: a stage of windows, the second block's shifted, and one that a window covers.
TINY = {
    "vit": ("test_vit", dict(depth=2, embed_dim=32, img_size=32)),
    "swin": ("swin_tiny_patch4_window7_224", dict(img_size=56, embed_dim=16, depths=(2, 1), num_heads=(1, 2))),
    "maxvit": ("maxvit_tiny_tf_224", dict(img_size=64, embed_dim=(32, 32), depths=(1, 1), stem_width=8)),
    "mixer": (MlpMixer, dict(img_size=96, patch_size=32, num_blocks=2, embed_dim=24)),
    "pvtv2": ("pvt_v2_b0", dict(depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2))),
}
WORST = dict(vit="end", swin="mid", stvit="end", stvit_plain="end")  # where the most can go wrong: inside windows
# At their other sizes windows are padded: what is padded is part of the mean in "mid", not in "end".
UNPADDED = dict.fromkeys(("swin_tiny_patch4_window7_224", "tiny_vit_5m_224"), 224)
SIDES = dict(vit=32, swin=56, maxvit=64, mixer=96, pvtv2=64)
REFUSED = yaml.safe_load(Path(__file__).with_name("refused_broadcasts.yaml").read_text("utf-8"))
WITHOUT = ("regnetx_002", "dla46_c", "mobilenetv3_small_050", "mobilenetv4_conv_small_035")  # any such block
DEFAULT = [
    *("convnext_atto", "vit", "deit_tiny_distilled_patch16_224", "cait_xxs24_224", "pit_ti_224", "swin", "maxvit"),
    *("pvtv2", "hiera_tiny_224", "mixer", "eva02", "convit", "tnt", "nest", "stvit", "emsnet", "mat", "partialformer"),
    *("pvt", "local_vit", "torchvision_vit"),
]
LARGER = [name for name in {**SHRUNK, **MORE, **FOREIGN} if name not in DEFAULT and COUNTS.get(name) != (0, 0)]
ARCHITECTURES = DEFAULT + [pytest.param(name, marks=pytest.mark.slow) for name in LARGER if name not in WITHOUT]
CASES = [(name, kind, "both", position) for name in ("vit", "swin") for kind in KINDS for position in POSITIONS]
CASES += [(name, "cb", branch, p) for name in ("vit", "swin") for branch in ("mlp", "attn") for p in POSITIONS]
CASES += [
    (name, kind, "mlp" if position == "mid" and name != "pvtv2" else "both", position)
    for name in ("mixer", "pvtv2", "stvit", "stvit_plain")
    for kind in ("scaled", "gate")
    for position in POSITIONS
]
QUICK = [(name, *how) for name in ("stvit", "emsnet") for how in zip(("cb", "scaled", "gate"), POSITIONS, strict=True)]
QUICK += [("stvit_plain", "cb", "end")]
FOLDED = [(name, "cb", "end", "mlp") for name in ("mat", "partialformer", "convnext_atto", "levit_128s")]
FOLDED += [("emsnet", "cb", position, "attn") for position in ("mid", "end")]  # nothing is folded with context inside
for row in [(name, kind, p) for name in ("stvit", "stvit_plain", "emsnet") for kind in KINDS for p in POSITIONS]:
    # The last layer of EMSNet's mixer is multiplied out.
    branch = "mlp" if row[2] == "mid" or (row[0], row[2]) == ("emsnet", "end") else "both"
    FOLDED.append(pytest.param(*row, branch, marks=[pytest.mark.slow] * (row not in QUICK)))


@cache
def _template(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in SHRUNK:
        return created(name)
    if name in TINY:
        given, sizes = TINY[name]
        make = given if given is MlpMixer else partial(timm.create_model, given)
        return randomize(make(drop_path_rate=0, **sizes)).eval()
    return randomize(({**OWN, **FOREIGN}.get(name) or MORE[name][0])()).eval()


def make_model(name: str) -> nn.Module:
    """In eval mode, always the same weights, none of them at its initial value."""
    return copy.deepcopy(_template(name))


def options(name: str) -> dict[str, int]:
    """The size that the model was built for, where it does not say so."""
    return dict(image_size=SIDE if name in FOREIGN else MORE[name][1]) if name in {**FOREIGN, **MORE} else {}


def images(name: str, batch: int = 2) -> Tensor:
    if name in SHRUNK:
        return timm_images(name, batch)
    side = SIDES.get(name) or options(name).get("image_size", 64)
    return torch.randn(batch, 3, side, side)


def broadcast(name: str, kind: str = "cb", branch: str = "mlp", position: str = "end", **more) -> nn.Module:
    return add_context_broadcast(make_model(name), kind, branch, position, **options(name), **more)


def layers(model: nn.Module) -> list[ContextBroadcast]:
    return [module for module in model.modules() if isinstance(module, ContextBroadcast)]


def fill_scales(model: nn.Module) -> nn.Module:
    """The same for all places of a width, so that a reference knows them without asking."""
    for module in layers(model):
        if module.scale is not None:
            module.scale.data.copy_(scale_of(len(module.scale)))
    return model


def scale_of(channels: int) -> Tensor:
    return torch.linspace(-1, 2, channels, dtype=torch.float64)


def hooks(model: nn.Module) -> dict[str, int]:
    return {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.enable_grad()
def test_models__keep_all_they_had(name):
    """Scaled by zero nothing changes, and every key stays; every parameter learns; each image has its own context."""
    plain, x = make_model(name), images(name)
    found = find_branches(plain, **options(name))
    kinds = sorted({one.kind for one in found}, reverse=True)
    branch = "both" if len(kinds) == 2 else kinds[0]
    position = next(p for p in ("front", "end") if all(getattr(one, p) is not None for one in found))
    before, model = plain.state_dict(), broadcast(name, "scaled", branch, position)
    after = model.state_dict()
    assert [key for key in after if key in before] == list(before)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    new = [key for key in after if key not in before]
    assert len(new) == len(found)
    assert all(key.endswith(".context_broadcast.scale") and not after[key].any() for key in new)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert broadcast(name, "cb", branch).state_dict().keys() == before.keys()
        plain, model, x = plain.double(), fill_scales(broadcast(name, "scaled", branch)).double(), x.double()
        got = model(x)
        assert (got - plain(x)).abs().max() > 1e-6 * got.abs().max()
        assert_close(got, torch.cat([model(image[None]) for image in x]), tolerance=1e-10)
        image = x[:1] if name not in UNPADDED else torch.randn(1, 3, *[UNPADDED[name]] * 2, dtype=torch.float64)
        for kind in kinds:  # the mean passes a linear layer, and half of its bias twice is the bias
            if all(one.mid is not None for one in found if one.kind == kind):
                middle, end = (broadcast(name, "cb", kind, place).double()(image) for place in ("mid", "end"))
                assert_close(middle, end, kind, 1e-10)
    assert_learns(name, "scaled", branch)


@pytest.mark.parametrize("name", ["vit", "swin", "mixer", "stvit", "local_vit"])
@torch.enable_grad()
def test_learning__with_the_other_kinds(name):
    """What is overwritten is not what autograd has kept."""
    for kind in ("cb", "gate", "hybrid"):
        assert_learns(name, kind, "both")


def assert_same_gradients(one: nn.Module, other: nn.Module, x: Tensor, tolerance: float) -> None:
    """Both give the same for x, to the parameters as well."""
    got, expected = one(x), other(x)
    assert_close(got, expected, tolerance=tolerance)
    for y in (got, expected):
        y.square().sum().backward()
    theirs = {key: p.grad for key, p in other.named_parameters()}
    for key, p in one.named_parameters():
        assert_close(p.grad, theirs[key.removeprefix("_orig_mod.")], key, tolerance)


def assert_learns(name: str, kind: str, branch: str) -> None:
    plain, model = make_model(name).train(), fill_scales(broadcast(name, kind, branch)).train()
    x, unused = images(name), []
    for one in (plain, model):
        y = one(x)
        (y if isinstance(y, Tensor) else sum(y)).square().sum().backward()
        unused.append([key for key, p in one.named_parameters() if p.requires_grad and p.grad is None])
    assert unused[1] == unused[0]
    scales = [module.scale.grad for module in layers(model) if module.scale is not None]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in scales)
    assert len(scales) == (len(layers(model)) if kind == "scaled" else 0) and len(layers(model)) > 0


def equation(x: Tensor, kind: str, batch: int, axis: int, class_token: bool) -> Tensor:
    """All tokens of an image together, however they are cut: the rows of an image follow each other."""
    shape = x.movedim(axis, -1).shape
    tokens = x.movedim(axis, -1).reshape(batch, -1, shape[-1])
    mean = tokens.mean(1, keepdim=True)
    first = tokens[:, :1] if class_token else mean
    result = dict(cb=(tokens + mean) / 2, gate=tokens * (first + 1), hybrid=tokens * first + (tokens + mean) / 2)
    result["scaled"] = tokens + scale_of(shape[-1]) * mean
    return result[kind].reshape(shape).movedim(-1, axis)


def apply_by_hand(model: nn.Module, kind: str, position: str, places: list[tuple], class_token: bool) -> nn.Module:
    """With places (module, projection, axis of its channels)."""
    batch: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: batch.__setitem__(slice(None), [len(inputs[0])]))

    def changed(x: Tensor, axis: int) -> Tensor:
        return equation(x, kind, batch[0], axis, class_token)

    for module, projection, axis in places:
        if position == "end":
            module.register_forward_hook(lambda m, inputs, y, axis=axis: changed(y, axis))
        else:
            target, where = (module, axis) if position == "front" else (projection, -1)
            target.register_forward_pre_hook(lambda m, inputs, w=where: (changed(inputs[0], w), *inputs[1:]))
    return model


def places_of(name: str, model: nn.Module, branch: str) -> list[tuple]:
    attn, mlp = [], []
    lists = dict(vit=["blocks"], mixer=["blocks"], swin=["layers.0.blocks", "layers.1.blocks"])
    stages = [f"stages.{i}.blocks" for i in range(2 if name == "pvtv2" else 4)]
    for block in (block for key in lists.get(name, stages) for block in model.get_submodule(key)):
        if name.startswith("stvit"):
            block.separate = True  # so that the branches give what they add
        if name == "mixer":
            attn.append((block.mlp_tokens, None, 1))
            mlp.append((block.mlp_channels, block.mlp_channels.fc2, -1))
        else:
            attn.append((block.attn, block.attn.proj, 1 if name.startswith("stvit") else -1))
            mlp.append((block.mlp, block.mlp.fc2, -1))
    return dict(attn=attn, mlp=mlp, both=attn + mlp)[branch]


@pytest.mark.parametrize(("name", "kind", "branch", "position"), CASES)
def test_values__are_the_equations(name, kind, branch, position):
    x = images(name, 3).double()
    by_hand = make_model(name).double()
    plain = by_hand(x)
    apply_by_hand(by_hand, kind, position, places_of(name, by_hand, branch), class_token=name == "vit")
    model = fill_scales(broadcast(name, kind, branch, position).double())
    expected = by_hand(x)
    assert not torch.allclose(expected, plain, rtol=1e-4)
    assert_close(model(x), expected, tolerance=1e-9)
    if (name, branch, position) == ("swin", "both", "end"):
        with torch.enable_grad():
            assert_same_gradients(by_hand, model, x, 1e-8)


@pytest.mark.parametrize(("kind", "size"), [("gate", 56), ("gate", 112), ("gate", 168), ("cb", 56), ("cb", 64)])
def test_values__windows_of_other_image_sizes(kind, size):
    """A single window may cover the image; 16 x 16 tokens are padded to 21 x 21, of which the mean is that of 256."""
    sizes = dict(embed_dim=16, depths=(1, 1), num_heads=(1, 2), strict_img_size=False)
    by_hand = randomize(timm.create_model("swin_tiny_patch4_window7_224", **sizes)).double().eval()
    ours = add_context_broadcast(copy.deepcopy(by_hand), kind, "attn")
    if kind == "gate":
        places = [(layer.blocks[0].attn, None, -1) for layer in by_hand.layers]
        apply_by_hand(by_hand, kind, "end", places, class_token=False)
    for layer in by_hand.layers if kind == "cb" else ():  # from the padding to the cropped map
        attend = layer.blocks[0]._attn
        layer.blocks[0]._attn = lambda x, attend=attend: equation(attend(x), "cb", len(x), -1, False)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    assert_close(ours(x), by_hand(x), tolerance=1e-10)


@pytest.mark.parametrize("size", [64, 448])
def test_values__our_windows_of_any_image_size(size):
    """The middle of the attention sees windows, its end the map: for cb that may not matter."""
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    middle, end = (broadcast("mat", "cb", "attn", position).double().forward_features(x) for position in ("mid", "end"))
    assert_close(middle, end, tolerance=1e-10)


@pytest.mark.parametrize("kind", ["gate", "hybrid"])
@pytest.mark.parametrize("class_token", [None, True, False])
def test_class_token__of_a_distilled_vit(kind, class_token):
    name = "deit_tiny_distilled_patch16_224"
    x, by_hand = images(name).double(), make_model(name).double()
    places = [(block.mlp, block.mlp.fc2, -1) for block in by_hand.blocks]
    apply_by_hand(by_hand, kind, "end", places, class_token=class_token is not False)
    model = broadcast(name, kind, class_token=class_token).double()
    assert_close(model(x), by_hand(x), tolerance=1e-10)
    assert {module.class_token for module in layers(model)} == {class_token is not False}
    assert {module.class_token for module in layers(broadcast("swin", "gate", "both"))} == {False}


def test_class_token__of_a_distilled_pit():
    x, by_hand = images("pit_distilled").double(), make_model("pit_distilled").double()
    places = [(stage.blocks[0].mlp, None, -1) for stage in by_hand.transformers]
    apply_by_hand(by_hand, "gate", "end", places, class_token=True)
    assert_close(broadcast("pit_distilled", "gate").double()(x), by_hand(x), tolerance=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_others__pyramid_with_a_late_class_token(kind, position):
    x, by_hand = images("pvt").double(), make_model("pvt").double()
    for block, class_token in ((by_hand.block1, False), (by_hand.block2, True)):
        places = [(block.attn, block.attn.proj, -1), (block.mlp, block.mlp.fc2, -1)]
        apply_by_hand(block, kind, position, places, class_token)
    model = fill_scales(add_context_broadcast(make_model("pvt").double(), kind, "both", position))
    assert_close(model(x), by_hand(x), tolerance=1e-10)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("local_vit", kind) for kind in KINDS), *(("torchvision_vit", kind) for kind in ("cb", "scaled"))],
)
@pytest.mark.parametrize("position", POSITIONS)
def test_others__mlps(name, kind, position):
    """Convolutions with the residual inside, which have a map in the middle too, and torchvision's."""
    by_hand, by_map = make_model(name).double(), name == "local_vit" and position == "mid"
    if name == "torchvision_vit":
        places = [(block.mlp, block.mlp[3], -1) for block in by_hand.encoder.layers]
    else:
        places = [(block.conv.conv[6] if by_map else block.conv.conv, None, 1) for block in by_hand.blocks]
    apply_by_hand(by_hand, kind, "front" if by_map else position, places, class_token=False)
    model = add_context_broadcast(make_model(name).double(), kind, "mlp", position, **options(name))
    x = images(name).double()
    assert_close(fill_scales(model)(x), by_hand(x), tolerance=1e-10)


@pytest.mark.parametrize("position", ["front", "end"])
@pytest.mark.parametrize("learns", [False, True])
@torch.enable_grad()
def test_others__torchs_attention(position, learns):
    """In front of it all that it takes gets context: queries, keys and values."""
    x, by_hand = images("torchvision_vit").double(), make_model("torchvision_vit").double()
    for block in by_hand.encoder.layers:
        if position == "front":
            block.ln_1.register_forward_hook(lambda _, inputs, y: equation(y, "cb", 2, -1, False))
        else:
            block.self_attention.register_forward_hook(lambda _, i, y: (equation(y[0], "cb", 2, -1, False), y[1]))
    model = broadcast("torchvision_vit", "cb", "attn", position).double()
    with torch.set_grad_enabled(learns):
        assert_close(model(x), by_hand(x), tolerance=1e-10)
    words = r"^there is no 'mid' in encoder.*self_attention \(MultiheadAttention\)"
    refused(words, broadcast, "torchvision_vit", "cb", "attn", "mid")


@torch.enable_grad()
def test_others__torchs_encoder_layer_in_inference():
    """It has a way past its parts there."""
    plain = randomize(TokenModel(nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)))).eval()
    model = add_context_broadcast(copy.deepcopy(plain), "cb", "attn")
    x = torch.randn(2, 3, SIDE, SIDE)
    expected = model(x).detach()
    with torch.no_grad():
        assert_close(model(x), expected, tolerance=1e-5)
        assert not torch.allclose(plain(x), expected, rtol=1e-3)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", ["cb", "scaled"])
def test_others__sequences_in_sequences(kind, position):
    """What is added to a sequence is not run as one more of its layers."""
    mlp = nn.Sequential(nn.Sequential(nn.Linear(16, 24), nn.GELU()), nn.Sequential(nn.Linear(24, 16), nn.Tanh()))
    by_hand = randomize(TokenModel(Residual(mlp))).double().eval()
    model = fill_scales(add_context_broadcast(copy.deepcopy(by_hand), kind, "mlp", position).double())
    mlp = by_hand.blocks[0].mlp
    apply_by_hand(by_hand, kind, position, [(mlp, mlp[1][0], -1)], class_token=True)
    x = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    assert_close(model(x), by_hand(x), tolerance=1e-10)


@pytest.mark.parametrize("name", ["vit", "swin", "mixer", "pvtv2", "local_vit"])
@pytest.mark.parametrize("position", ["front", "end"])
@torch.enable_grad()
def test_weights__new_ones_are_like_those_of_their_place(name, position):
    for dtype in (torch.bfloat16, torch.float64):
        model = make_model(name).to(dtype).requires_grad_(False)
        add_context_broadcast(model, "scaled", "both", position, **options(name))
        scales = [module.scale for module in layers(model)]
        assert scales and {scale.dtype for scale in scales} == {dtype} and all(s.requires_grad for s in scales)
        assert {p.requires_grad for key, p in model.named_parameters() if "context_broadcast" not in key} == {False}
        with torch.no_grad():
            assert model(images(name).to(dtype)).dtype == dtype
    empty = add_context_broadcast(make_model(name).to("meta"), "scaled", "both", position, **options(name))
    assert {p.device.type for p in empty.parameters()} == {"meta"}


def test_weights__new_ones_of_a_place_without_any():
    """Behind an activation there is no weight to be like; the branch's are."""
    for device, dtype in (("cpu", torch.float64), ("meta", torch.float32)):
        mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.Tanh())
        model = add_context_broadcast(TokenModel(Residual(mlp)).to(device, dtype), "scaled")
        assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, dtype)}


def test_weights__modes_are_kept_and_half_precision_stays_close():
    for training in (True, False):
        model = make_model("vit").train(training)
        model.blocks[1].train(not training)
        add_context_broadcast(model, "scaled", "both")
        for i, block in enumerate(model.blocks):
            assert {m.training for m in block.modules()} == {training != (i == 1)}
    for kind in KINDS:
        model, x = fill_scales(broadcast("swin", kind, "both")), images("swin")
        half = copy.deepcopy(model).bfloat16()(x.bfloat16())
        assert half.dtype == torch.bfloat16
        assert_close(half.float(), model(x), kind, 0.2)


@pytest.mark.parametrize("name", ["vit", "swin", "stvit"])
@pytest.mark.parametrize("kind", ["scaled", "gate"])
def test_copies__are_equal(name, kind, tmp_path):
    model, x = fill_scales(broadcast(name, kind, "both", WORST[name])), images(name)
    model(x[:1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and hooks(other) == hooks(model)
        assert not {id(module) for module in model.modules()} & {id(module) for module in other.modules()}
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = add_context_broadcast(randomize(make_model(name)), kind, "both", WORST[name])
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.save(model, tmp_path / "whole.pt")
    for same in (other, torch.load(tmp_path / "whole.pt", weights_only=False)):
        assert torch.equal(same(x), model(x))


def test_copies__count_their_own_images():
    """A copy of a windowed model, run between, has another batch."""
    model, x = broadcast("swin", "cb", "attn", "mid"), images("swin", 3)
    other, expected = copy.deepcopy(model), model(x)
    other.layers[0].blocks[0].attn.register_forward_pre_hook(lambda *_: model(x[:2]) is None or None)
    assert torch.equal(other(x), expected)


def test_threads__do_not_see_each_other():
    """Both threads are inside the first block, with batches of different sizes, before either goes on."""
    model, batches = broadcast("swin", "cb", "attn", "mid"), [images("swin", n) for n in (1, 3)]
    assert_threads_apart(model, "layers.0.blocks.0.norm1", batches)


@pytest.mark.parametrize("name", ["vit", "swin"])
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_export__gives_the_same_numbers(name, dynamic):
    model, x = fill_scales(broadcast(name, "scaled", "both", WORST[name])), images(name)
    shapes = ({0: Dim("batch", min=1, max=16)},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    x = images(name, 5 if dynamic else 2)
    assert_close(program.module()(x), model(x), tolerance=1e-5)
    assert_close(copy.deepcopy(model)(x), model(x), tolerance=1e-6)  # the model is none the worse


COMPILED = [(name, kind) for name in ("vit", "swin", "stvit") for kind in KINDS]


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*one, marks=[pytest.mark.slow] * (one != ("swin", "cb"))) for one in COMPILED]
)
@torch.enable_grad()
def test_compile__is_one_graph_with_the_same_gradients(name, kind):
    model, x = fill_scales(broadcast(name, kind, "both", WORST[name]).double()), images(name).double()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    assert_same_gradients(compiled, model, x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "swin", "stvit"])
@pytest.mark.parametrize("kind", ["scaled", "gate"])
@torch.enable_grad()
def test_compile__inductor_gives_the_same_numbers(name, kind):
    model, x = fill_scales(broadcast(name, kind, "both", WORST[name])), images(name)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True)(x), model(x), tolerance=1e-3)


@pytest.mark.parametrize(("name", "node"), [("vit", "blocks.1.mlp.fc2"), ("swin", "layers.1.blocks.0.mlp.fc2")])
def test_fx_and_intermediates__features_have_context(name, node):
    model, x, seen = broadcast(name, "cb", "both"), images(name), []
    with model.get_submodule(node).register_forward_hook(lambda m, inputs, y: seen.append(y.clone())):
        model(x)
    extractor = create_feature_extractor(model, {node: "features"})
    assert_close(extractor(x)["features"], seen[0], tolerance=1e-5)
    model = broadcast(name, "gate", "both")
    final, maps = model.forward_intermediates(x)
    plain = make_model(name).forward_intermediates(x, intermediates_only=True)
    assert not any(torch.allclose(one, other, rtol=1e-3) for one, other in zip(maps, plain, strict=True))
    assert_close(model.forward_head(final), model(x), tolerance=1e-5)


@pytest.mark.parametrize("name", ["vit", "swin", "stvit_plain"])
@pytest.mark.parametrize("kind", ["scaled", "gate"])
@torch.enable_grad()
def test_checkpointing__changes_no_gradient(name, kind):
    model, x = fill_scales(broadcast(name, kind, "both", WORST[name])).double().train(), images(name).double()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    assert_same_gradients(other, model, x, 1e-9)


@pytest.mark.parametrize("name", ["vit", "swin"])
@torch.enable_grad()
def test_distributed__steps_as_alone(name, tmp_path, request):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    model, x = broadcast(name, "scaled", "both", WORST[name]).train(), images(name)
    alone = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for one in (wrapped, alone):
        optimizer = torch.optim.SGD(one.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for (key, p), (_, q) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert_close(p.detach(), q.detach(), key, 1e-4)
    assert all(module.scale.any() for module in layers(model))


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", "test_convnext"])
def test_features_only__are_those_of_the_whole_model(name):
    features = timm.create_model(name, features_only=True, **SHRUNK[name]).eval()
    whole, state = timm.create_model(name, **SHRUNK[name]).eval(), features.state_dict()
    known = {key.removeprefix("model.").replace("_", ".", 1): key for key in state}  # timm's extractor renames modules
    known |= {key.removeprefix("model."): key for key in state}
    renamed = {key: state[known[key]] for key in whole.state_dict() if key in known}
    whole.load_state_dict(renamed, strict=False)
    for model in (features, whole):
        add_context_broadcast(model, "gate", "mlp" if name == "test_convnext" else "both")
    x = torch.randn(2, 3, *whole.pretrained_cfg["input_size"][1:])
    expected = whole.forward_intermediates(x, indices=features.feature_info.out_indices, intermediates_only=True)
    for got, one in zip(features(x), expected, strict=True):
        assert_close(got if got.shape == one.shape else got.permute(0, 3, 1, 2), one, tolerance=1e-5)


@pytest.mark.parametrize(("name", "kind", "position", "branch"), FOLDED)
def test_fuse__keeps_the_outputs(name, kind, position, branch):
    single = branch == "attn" or name == "levit_128s"  # where timm folds
    dtype = torch.float32 if single else torch.float64
    model, x = fill_scales(broadcast(name, kind, branch, position).to(dtype)), images(name).to(dtype)
    fused = fuse(model)
    assert len(layers(fused)) == len(layers(model)) > 0
    assert_close(fused(x), model(x), tolerance=1e-4 if single else 1e-9)


def test_fuse_and_residual__refused_or_apart_only_where_context_comes_between():
    words = r"^folding LevitDistilled would lose its context broadcasting, which lies inside"
    refused(words, fuse, broadcast("levit_128s", "cb", "mlp", "mid"))  # timm replaces LeViT's layers by folded ones
    for branch, apart in (("mlp", False), ("attn", True)):
        assert {stage.blocks[0].separate for stage in broadcast("stvit_plain", "cb", branch).stages} == {apart}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("position", ["front", "end"])
def test_slices__are_taken_with_context_but_not_with_other_hooks(name, position, monkeypatch):
    model, x = broadcast(name, "scaled", "mlp", position), torch.randn(3, 3, 32, 32)
    expected, seen = fill_scales(model)(x), []
    monkeypatch.setattr(slices, "STAGE_BYTES", 1)
    forward = model.stages[0].forward
    model.stages[0].forward = lambda x: seen.append(len(x)) or forward(x)
    assert_close(model(x), expected, tolerance=1e-5)
    with model.stages[0].blocks[0].register_forward_hook(lambda *_: None):
        assert_close(model(x), expected, tolerance=1e-5)
    assert seen == [1, 1, 1, 3]


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224"])
def test_pooling__before_and_after_are_the_same(name):
    settings = dict(dim=48, heads=4, mlp_dim=96, attn_dim=24, num_classes=7)
    first = swap_pool(add_context_broadcast(created(name), "gate", "both"), "map", **settings).eval()
    second = add_context_broadcast(swap_pool(created(name), "map", **settings), "gate", "both").eval()
    assert len(layers(first)) == len(layers(second)) > 0
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 3, *first.pyramid.image_size)
    assert_close(second(x), first(x), tolerance=1e-5)
    plain = swap_pool(created(name), "map", **settings).eval()
    plain.load_state_dict(first.state_dict())
    assert not torch.allclose(plain(x), first(x), rtol=1e-3)


def untouched(model: nn.Module, call: Callable[[nn.Module], object], words: str) -> None:
    """The call is refused in one line, and the model is as it was."""
    before, hooked, modes = copy.deepcopy(model.state_dict()), hooks(model), [m.training for m in model.modules()]
    refused(words, call, model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], value) for key, value in before.items())
    assert hooks(model) == hooked and [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("name", ["vit", "swin"])
@pytest.mark.parametrize("again", [{}, dict(kind="scaled", branch="attn"), dict(position="front")])
def test_refused__a_second_time(name, again):
    model, x = broadcast(name, "scaled", "both").train(), images(name)
    expected = model(x)
    words = r"^\w+ broadcasts context already \(.*context_broadcast\); start from a fresh model$"
    untouched(model, lambda model: add_context_broadcast(model, **again), words)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(("name", "arguments", "words"), REFUSED)
def test_refused__and_left_as_it_was(name, arguments, words):
    model = make_model(name)
    next(model.children()).train()
    untouched(model, lambda model: add_context_broadcast(model, **{**options(name), **arguments}), words)


def test_refused__no_model_which_is_returned():
    for model in ("test_vit", None, nn.Linear):
        words = r"^model is a (str|NoneType|type); expected a model, as timm\.create_model"
        refused(words, add_context_broadcast, model)
    model = make_model("vit")
    assert add_context_broadcast(model) is model and len(layers(model)) == 2
    assert "ContextBroadcast('cb', dim=32)" in repr(model)
