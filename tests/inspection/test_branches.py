"""Which branches are found in a model, what their tokens look like, and that looking leaves no trace."""

from functools import cache

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

import broadsight
from broadsight.inspection.branches import Branch, Tokens, find_branches
from broadsight.layers import ChannelMlp, PartialAttention
from broadsight.models import MAT, EMSNet, PartialFormer, STViT
from tests.analysis.measures.toy_models import Made
from tests.inspection.foreign_blocks import FOREIGN, MORE, SIDE, Residual, TokenModel, attention
from tests.inspection.timm_models import SHRUNK, created, read_table

OWN = {
    "stvit": lambda: STViT((16, 24, 32, 40), (1, 1, 1, 1), (1, 2, 2, 2), layer_scale=(None, 0.5, None, 0.5)),
    "emsnet": lambda: EMSNet((16, 24, 32, 64), (1, 1, 1, 1)),
    "mat": lambda: MAT(16, (1, 1, 1, 1), (2, 4), hidden=24),
    "partialformer": lambda: PartialFormer(16, (1, 1, 1, 1), (1, 2, 2, 4), hidden=24),
}


def without_content(name: str, **options) -> nn.Module:
    """On the meta device, shrunk where a table says how."""
    with torch.device("meta"):
        if name in OWN or name in MORE:
            return (OWN.get(name) or MORE[name][0])(**options)
        return timm.create_model(name, **{**SHRUNK.get(name, {}), **options})


@cache
def branches_of(name: str) -> list[Branch]:
    return find_branches(without_content(name), image_size=MORE[name][1] if name in MORE else None)


def found(name: str, kind: str) -> list[Branch]:
    return [branch for branch in branches_of(name) if branch.kind == kind]


def places(branch: Branch) -> list[Tokens]:
    return [tokens for tokens in (branch.front, branch.mid, branch.end) if tokens is not None]


def assert_untouched(model: nn.Module, look) -> None:
    """Nothing of what looking could leave behind is in a model."""

    def traces() -> list:
        hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in model.modules()]
        return [tuple(map(len, some)) for some in hooks] + [m.training for m in model.modules()]

    before, state = traces(), {key: value.clone() for key, value in model.state_dict(keep_vars=True).items()}
    look()
    assert traces() == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())


TABLE = read_table("branches.yaml")
COUNTS = {name: tuple(counts) for *counts, names in TABLE["counts"] for name in names.split()}
SLOW = TABLE["slow"].split()


def counted(branches: list[Branch]) -> tuple[int, ...]:
    return tuple(sum(branch.kind == kind for branch in branches) for kind in ("attn", "mlp"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COUNTS])
def test_counts__of_timm_and_ours(name):
    branches = branches_of(name)
    assert counted(branches) == COUNTS[name]
    assert len({branch.name for branch in branches}) == len(branches)
    if name in OWN:
        assert {type(branch.module) for branch in branches if branch.kind == "mlp"} == {ChannelMlp}


def test_counts__of_others_and_of_any_depth():
    """A model without candidates is not even run: the convolution could not be."""
    for name, make in FOREIGN.items():
        expected = (4, 4) if name == "torchvision_swin" else (2, 2)
        assert counted(find_branches(make(), image_size=SIDE)) == expected, name
    assert find_branches(nn.Conv2d(3, 4, 3)) == [] and find_branches(resnet18()) == []
    for depth in (1, 3):
        names = [branch.name for branch in find_branches(without_content("test_vit", depth=depth))]
        assert names == [f"blocks.{i}.{part}" for i in range(depth) for part in ("attn", "mlp")]


@pytest.mark.parametrize(("name", "options", "part"), TABLE["left_out"])
def test_left_out__what_sees_no_tokens_of_the_image(name, options, part):
    model = without_content(name, **options)
    assert any(part in key.split(".") for key, _ in model.named_modules())
    branches = find_branches(model) if options else branches_of(name)
    assert len(branches) > 1
    assert [branch.name for branch in branches if part in branch.name.split(".")] == []


def test_left_out__the_swapped_pool():
    names = [f"backbone.blocks.{i}.{k}" for i in range(6) for k in ("attn", "mlp")]
    for pool in ("map", "cap", "gap"):
        branches = find_branches(broadsight.swap_pool(created("test_vit"), pool))
        assert [branch.name for branch in branches] == names  # the last map is the last block's: none is cut off
        assert {tokens.class_token for branch in branches for tokens in places(branch)} == {True}


AXES = [(name, tuple(axes)) for *axes, names in TABLE["axes"] for name in names.split()]


@pytest.mark.parametrize(("name", "axes"), AXES)
def test_layout__of_timm_and_ours(name, axes):
    branches = found(*name.split("."))
    for branch in branches:
        got = tuple(tokens and tokens.channel_axis for tokens in (branch.front, branch.mid, branch.end))
        assert got == axes, branch.name
    if name == "partialformer.attn":
        assert {type(branch.module) for branch in branches} == {PartialAttention}


def test_layout__of_super_tokens_and_of_a_vit():
    """Super tokens have a middle only where each is a pixel."""
    branches = found("stvit", "attn")
    assert [branch.mid is None for branch in branches] == [branch.module.cell != (1, 1) for branch in branches]
    assert {tokens.channel_axis for branch in branches for tokens in (branch.front, branch.end)} == {1}
    for branch in branches_of("test_vit"):
        hidden = 192 if branch.kind == "mlp" else 64
        assert [tokens.channels for tokens in places(branch)] == [64, hidden, 64]
        assert {tokens.count for tokens in places(branch)} == {101}


def test_channels__where_the_side_is_as_long_as_the_channels_are_many():
    """Seven channels on maps of 7x7 and tokens as many as channels: the shapes alone would not tell."""
    parts = dict(img_size=28, stem=nn.Conv2d(3, 7, 4, 4), tokens=nn.Conv2d(7, 49, 1))
    parts["mlp"] = nn.Sequential(nn.Conv2d(7, 7, 1), nn.GELU(), nn.Conv2d(7, 7, 1))
    parts["ffn"] = nn.Sequential(nn.Linear(49, 49), nn.GELU(), nn.Linear(49, 49))

    def forward(self: Made, x: Tensor) -> Tensor:
        return self.ffn(self.tokens(self.mlp(self.stem(x))).flatten(2).mT)

    first, second = find_branches(Made(forward, **parts))
    assert [tokens.channel_axis for tokens in places(first)] == [1, 1, 1]
    assert [tokens.channel_axis for tokens in places(second)] == [2, 2, 2]


CLASS_TOKEN = [(name, options, there) for there, options, names in TABLE["class_token"] for name in names.split()]


@pytest.mark.parametrize(("name", "options", "expected"), CLASS_TOKEN)
def test_class_token__is_where_the_model_puts_one(name, options, expected):
    branches = find_branches(without_content(name, **options)) if options else branches_of(name)
    assert branches and {tokens.class_token for branch in branches for tokens in places(branch)} == {expected}


def test_class_token__of_some_branches_alone():
    """It joins late, or is among the outer tokens, or is split off for convolutions."""
    late = {branch.name: branch.end.class_token for branch in branches_of("convit")}
    assert late == {name: name.startswith("blocks.2.") for name in late} and any(late.values())
    for branch in branches_of("tnt"):
        inner = branch.name.endswith("_in")
        assert (branch.end.class_token, branch.end.windowed) == (not inner, inner)
    late = {branch.name: branch.end.class_token for branch in find_branches(FOREIGN["pvt"]())}
    assert late == {"block1.attn": False, "block1.mlp": False, "block2.attn": True, "block2.mlp": True}
    split = [(branch.kind, branch.end.class_token) for branch in find_branches(FOREIGN["local_vit"]())]
    assert split == [("attn", True), ("mlp", False)] * 2


@pytest.mark.parametrize(("name", "before", "behind"), TABLE["beside"])
def test_windows__the_middle_sees_them_and_the_ends_where_there_is_no_other_place(name, before, behind):
    branches = branches_of(name)
    assert not any(tokens.windowed for branch in branches if branch.kind == "mlp" for tokens in places(branch))
    for branch in (branch for branch in branches if branch.kind == "attn"):
        block = branch.mid.block
        assert branch.mid.windowed and branch.front.windowed == (before is None) and not branch.end.windowed
        assert branch.front.module is (branch.module if before is None else block.get_submodule(before))
        assert branch.end.module is block.get_submodule(behind) and branch.end.side == "input"


def test_windows__one_that_covers_the_image_is_one_too_but_a_whole_batch_is_none():
    for name in ("test_vit", "pvt_v2_b0", "hiera_tiny_224", "nest", "twins"):
        assert not any(tokens.windowed for branch in branches_of(name) for tokens in places(branch)), name
    *_, last = found("swin_tiny_patch4_window7_224", "attn")
    assert last.name.startswith("layers.3.") and last.end.count == 49
    assert last.mid.windowed and last.end.module is last.mid.block.drop_path1
    for branch in [*found("davit", "attn"), *found("mobilevit_xxs", "attn")]:
        channels = type(branch.module).__name__ == "ChannelAttention"
        assert branch.mid.windowed != channels, branch.name
    # Inside ours, which gives whole maps, in every stage: where there is one window alone, a larger image has several
    assert [(branch.end.windowed, branch.mid.windowed) for branch in found("mat", "attn")] == [(False, True)] * 2
    # nor is a place that serves two branches, such as one stochastic depth: what is added there would be in both
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(2,), num_heads=(1,))
    for block in model.layers[0].blocks:
        block.drop_path1 = block.drop_path2 = nn.Identity()
    for branch in find_branches(model):
        if branch.kind == "attn":
            assert branch.end.windowed and branch.end.module is branch.module.proj


def test_models__features_only_and_other_channels():
    assert [len(find_branches(created("test_vit", in_chans=count))) for count in (1, 4)] == [12, 12]
    branches = find_branches(timm.create_model("test_vit", features_only=True))
    assert [branch.name for branch in branches][:2] == ["model.blocks.0.attn", "model.blocks.0.mlp"]
    assert {branch.end.class_token for branch in branches} == {True}
    listed = timm.create_model("test_convnext", features_only=True)
    assert len(find_branches(listed)) == len(found("test_convnext", "mlp")) == 9


def test_models__that_ask_for_values_and_tokens_given_by_keyword():
    """A model that cannot run without arithmetic is run with it."""

    def asks(self: Made, x: Tensor) -> Tensor:
        return x + self.mlp(x) if x.abs().sum() >= 0 else x

    for dtype in (torch.float32, torch.float64):
        mlp = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
        (branch,) = find_branches(TokenModel(Made(asks, mlp=mlp)).to(dtype))
        assert branch.end.count == 17 and branch.end.class_token
    block = Made(lambda self, x: x + self.attn(x=x), attn=attention(16))
    assert [branch.name for branch in find_branches(TokenModel(block))] == ["blocks.0.attn"]


def test_models__no_place_is_a_sequence_and_the_branch_is_inside_its_residual():
    """A sequence would run whatever is added to it."""
    one, two = (nn.Linear(16, 24), nn.GELU()), (nn.Linear(24, 16), nn.Tanh())
    nested = nn.Sequential(*one), nn.Sequential(*two)
    for layers in ((nested[0], two[0]), (*one, nested[1]), nested):
        (branch,) = find_branches(TokenModel(Residual(nn.Sequential(*layers))))
        assert [type(t.module) for t in places(branch) if isinstance(t.module, nn.Sequential)] == []
    model = FOREIGN["local_vit"]()
    first = next(branch for branch in find_branches(model) if branch.kind == "mlp")
    conv = model.blocks[0].conv.conv
    assert (first.name, first.module, first.projection) == ("blocks.0.conv.conv", conv, conv[6])
    assert [tokens.module for tokens in places(first)] == [first.module[0], first.module[6], first.module[7]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", "levit_128s", "tiny_vit_5m_224"])
def test_trace__looking_leaves_none(name, training):
    model = created(name).train(training)
    next(model.children()).train(not training)
    assert_untouched(model, lambda: find_branches(model))


@pytest.mark.parametrize("name", ["convit", "eva02", "levit_128s", "twins", "volo", "dinov3"])
@torch.no_grad()
def test_trace__the_model_runs_as_before(name):
    make, side = MORE.get(name) or (lambda: created(name), 224)
    model, fresh, x = make().eval(), make().eval(), torch.randn(1, 3, side, side)
    fresh.load_state_dict(model.state_dict())
    for looked_into in (fresh, model):  # before it has run, and after
        find_branches(looked_into, image_size=side)
        assert torch.equal(fresh(x), model(x))


FAULTS = {"KeyError: 'bananas'": KeyError("bananas"), "AssertionError": AssertionError()}
FAULTS["out of order"] = RuntimeError("out of order\nand more")


@pytest.mark.parametrize(("reason", "fault"), FAULTS.items())
def test_refused__models_that_do_not_run(reason, fault):
    words = rf"^Made does not run on images of 224x224 \({reason}\); pass the image_size that it was built for$"

    def look() -> None:
        with pytest.raises(ValueError, match=words) as error:
            find_branches(model)
        assert "\n" not in str(error.value) and repr(error.value.__cause__) == repr(fault)

    def fails(self: Made, x: Tensor) -> Tensor:
        raise fault

    model = Made(fails, mlp=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).train()
    assert_untouched(model, look)


def test_size__given_where_the_model_does_not_say():
    for size in (32, (32, 32), [32, 32]):
        assert len(find_branches(FOREIGN["torchvision_vit"](), image_size=size)) == 4
    with pytest.raises(ValueError, match=r"^VisionTransformer does not run on images of 224x224 \(.*\); pass the"):
        find_branches(FOREIGN["torchvision_vit"]())
