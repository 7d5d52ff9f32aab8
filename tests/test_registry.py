"""What every registered model promises. Nothing is listed by hand: registering a model puts it here."""

import math
import pickle
import re
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import DropPath
from timm.models import group_parameters, save_for_hf
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import broadsight.models
from broadsight.layers.kernels import slices
from broadsight.models import FAMILIES, PartialFormer
from tests.compare import assert_all_close, assert_close, randomize
from tests.refusals import refused
from tests.zoo import DEPTHS, KINDS, NAMES, shallow

CLASSES, REDUCTIONS = 7, [4, 8, 16, 32]
each_kind = pytest.mark.parametrize("name", KINDS, scope="module")


def in_inference(test):
    return each_kind(torch.no_grad()(test))


# What is computed is computed for one model of every kind; the others differ in their sizes, and take part in
# `make test-slow`. What is looked up is looked up for all.
LATER = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in KINDS]
each_name = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(scope="module", params=[*KINDS, *LATER])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def template(name) -> nn.Module:
    torch.manual_seed(0)
    return randomize(shallow(name, num_classes=CLASSES)).eval()


@pytest.fixture(scope="module")
def blank(name) -> nn.Module:
    """The model at its full depth, without memory."""
    return timm.create_model(name, drop_path_rate=0.3, device="meta").eval()


@pytest.fixture
def model(template) -> nn.Module:
    """In eval mode, with no parameter or statistic at its initial value."""
    return deepcopy(template)


@pytest.fixture
def fresh(name):
    """Builds the model as the registry does, always from the same seed."""

    def build(**kwargs) -> nn.Module:
        torch.manual_seed(0)
        return shallow(name, **{"num_classes": CLASSES, **kwargs}).eval()

    return build


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64)


def grid(height: int, width: int, stride: int) -> tuple[int, int]:
    return math.ceil(height / stride), math.ceil(width / stride)


def normed(model: nn.Module, x: Tensor) -> Tensor:
    """A map by the model's norm, which may be one of tokens."""
    return model.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if type(model.norm) is nn.LayerNorm else model.norm(x)


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor | None]:
    """Of a fixed random projection of the outputs in training mode."""
    outputs = model.train()(images)
    (outputs * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_families__are_the_model_files_and_each_registers():
    files = {path.stem for path in Path(broadsight.models.__file__).parent.glob("[!_]*.py")}
    assert set(FAMILIES) == files - {"edited", "from_run"}  # which are no models by themselves
    assert [family for family in FAMILIES if not timm.list_models(module=family)] == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", ["broadsight, timm", "timm, broadsight", "broadsight.layers"])
def test_import__registers_whatever_comes_first_and_whatever_the_process_is_called(first):
    code = f"import sys; sys.argv[0] = 'broadsight'; import {first}; import timm, timm.data\n"
    code += "print([timm.is_model(name) for name in ('stvit_small', 'map_resnet50', 'edited', 'dense_model')])\n"
    code += "print(type(timm.__spec__.loader).__name__, type(timm.__loader__).__name__)"
    assert run_python(code).splitlines() == [str([True] * 4), "SourceFileLoader SourceFileLoader"]


def test_import__registers_with_a_timm_that_another_finder_finds_and_after_a_failure(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "timm.py").write_text("raise RuntimeError('not now')")
    code = f"""
import importlib.machinery, sys, broadsight
class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, found, target) if name == "timm" else None
found, sys.path_importer_cache = [{str(tmp_path / "broken")!r}], {{}}
sys.meta_path.insert(1, Elsewhere())
try:
    import timm
except RuntimeError as error:
    print(error)
    found = None
import timm
print(timm.is_model("stvit_small"))
"""
    assert run_python(code) == "not now\nTrue\n"


@each_name
def test_description__names_layers_that_exist(name, blank):
    cfg, state = blank.default_cfg, blank.state_dict()
    assert cfg["architecture"] == name
    assert state[f"{cfg['first_conv']}.weight"].shape[1] == blank.in_chans == cfg["input_size"][0]
    assert state[f"{cfg['classifier']}.weight"].shape[0] == blank.num_classes == cfg["num_classes"]
    assert blank.get_submodule(cfg["classifier"]) is blank.get_classifier()


@torch.no_grad()
def test_features__are_what_the_model_declares(fresh):
    model = fresh(features_only=True)
    assert model.feature_info.reduction() == REDUCTIONS
    channels = model.feature_info.channels()
    for size in [(64, 64), (96, 64), (33, 47), (225, 301), (1, 1)]:
        maps = model(torch.randn(1, 3, *size))
        assert [m.shape for m in maps] == [(1, c, *grid(*size, r)) for c, r in zip(channels, REDUCTIONS, strict=True)]
        assert all(m.isfinite().all() for m in maps)


@in_inference
def test_features__by_index_keep_values_and_order(fresh, images):
    whole = fresh(features_only=True)
    maps = whole(images)
    for indices, taken in [((1, 3), [1, 3]), ((-4,), [0]), ((-3, -2), [1, 2]), ((3, 0), [3, 0]), (2, [2, 3])]:
        part = fresh(features_only=True, out_indices=indices)
        assert part.feature_info.channels() == [whole.feature_info.channels()[i] for i in taken]
        assert part.feature_info.reduction() == [REDUCTIONS[i] for i in taken]
        for got, i in zip(part(images), taken, strict=True):
            assert_close(got, maps[i], tolerance=1e-6)


@each_kind
def test_features__feed_a_pyramid(fresh):
    from torchvision.ops import FeaturePyramidNetwork

    model = fresh(features_only=True).train()
    pyramid = FeaturePyramidNetwork(model.feature_info.channels(), 16)
    levels = pyramid({str(i): m for i, m in enumerate(model(torch.randn(2, 3, 75, 96)))})
    assert [level.shape for level in levels.values()] == [(2, 16, *grid(75, 96, r)) for r in REDUCTIONS]
    sum(level.square().mean() for level in levels.values()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@each_kind
def test_features__feed_a_segmentation_model(name):
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.FPN(f"tu-{name}", encoder_weights=None, in_channels=3, classes=2, decoder_pyramid_channels=16).eval()
    with torch.no_grad():
        masks = model(torch.randn(1, 3, 64, 96))
    assert masks.shape == (1, 2, 64, 96) and masks.isfinite().all() and masks.std() > 0


@torch.no_grad()
def test_forward__is_features_then_head_at_any_size(model):
    cfg = model.default_cfg
    for size in [(32, 32), (33, 47), (70, 50), (96, 160), cfg["input_size"][1:]]:
        images = torch.randn(2, 3, *size)
        features = model.forward_features(images)
        last = model.as_map(features, grid(*size, 32))  # without a class token
        assert last.shape == (2, model.num_features, *grid(*size, 32)) and last.numel() > 0.4 * features.numel()
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (2, model.head_hidden_size)
        logits = model(images)
        assert logits.shape == (2, CLASSES) and logits.isfinite().all()
        assert torch.equal(model.forward_head(features), logits)
        assert_close(model.get_classifier()(pooled), logits, tolerance=1e-6)
    assert last.shape[2:] == cfg["pool_size"]


@pytest.mark.slow
@torch.no_grad()
def test_forward__detection_size(model):
    maps = model.forward_intermediates(torch.randn(1, 3, 800, 1333), intermediates_only=True)
    assert [m.shape[2:] for m in maps] == [grid(800, 1333, r) for r in REDUCTIONS]
    assert all(m.isfinite().all() for m in maps)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (5, 3)])
@each_kind
def test_forward__tiny_images(model, size):
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, CLASSES) and logits.isfinite().all() and not torch.equal(logits[0], logits[1])


@each_kind
@pytest.mark.parametrize("shape", [(2, 4, 64, 64), (3, 64, 64), (2, 64, 64, 3), (2, 3, 0, 64), (2, 3, 64, 0)], ids=str)
def test_forward__refuses_what_are_no_images(template, shape):
    message = f"images have shape {shape}; expected (batch, 3, height, width)"
    if 0 in shape:
        message = f"images are {shape[2]}x{shape[3]} pixels; height and width must be at least 1"
    for call in (template.forward, template.forward_intermediates):
        refused(f"^{re.escape(message)}$", call, torch.zeros(shape))


@each_kind
@pytest.mark.parametrize("sliced", [False, True])
def test_forward__a_batch_of_8_equals_8_images(model, sliced, monkeypatch):
    """Sliced as in inference, three at a time, or in one call."""
    model, x = model.double(), torch.randn(8, 3, 64, 48, dtype=torch.float64)
    expected = torch.cat([model(image[None]) for image in x])
    if sliced:
        monkeypatch.setattr(slices, "STAGE_BYTES", 3 * x[0].numel())
    with torch.set_grad_enabled(not sliced):
        assert_close(model(x), expected, "logits", 1e-11)
    assert not torch.allclose(expected[1:], expected[:-1])


@in_inference
def test_forward__memory_format_does_not_matter_and_precisions_agree(model, images):
    expected = model(images)
    wide = torch.zeros(2, 3, 64, 128)
    wide[..., ::2] = images
    for same in (images.contiguous(memory_format=torch.channels_last), wide[..., ::2], images.mT.contiguous().mT):
        assert same.stride() != images.stride()
        assert_close(model(same), expected, tolerance=1e-6)
    double = deepcopy(model).double()(images.double())
    half = model.bfloat16()(images.bfloat16())
    assert double.dtype == torch.float64 and half.dtype == torch.bfloat16
    assert double.isfinite().all() and half.isfinite().all()
    if not isinstance(model, PartialFormer):  # which picks other tokens when scores are rounded
        assert_close(expected.double(), double, tolerance=1e-4)
        assert_close(half.double(), double, tolerance=0.15)


@each_kind
def test_autocast__stays_close_and_backward_is_finite(model, images):
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        if not isinstance(model, PartialFormer):  # which picks other tokens when scores are rounded
            assert_close(model(images).float(), expected, tolerance=0.15)
        logits = model.train()(images)
        loss = nn.functional.cross_entropy(logits, torch.tensor([1, 2]))
    loss.backward()
    assert logits.isfinite().all() and logits.dtype == torch.bfloat16
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@in_inference
def test_intermediates__by_index_with_the_models_norm_and_in_their_format(model, images):
    final, maps = model.forward_intermediates(images)
    assert_close(final, model.forward_features(images), tolerance=1e-6)
    shapes = [(2, info["num_chs"], *grid(64, 64, info["reduction"])) for info in model.feature_info]
    assert [m.shape for m in maps] == shapes
    for indices, taken in [(1, [3]), (3, [1, 2, 3]), ([0, 2], [0, 2]), ((-1, 1), [3, 1]), (None, [0, 1, 2, 3])]:
        got = model.forward_intermediates(images, indices=indices, intermediates_only=True)
        assert isinstance(got, list)
        for one, i in zip(got, taken, strict=True):
            assert torch.equal(one, maps[i])
    plain = model.forward_intermediates(images, intermediates_only=True)
    final, maps = model.forward_intermediates(images, norm=True, output_fmt="NHWC")
    last = model.as_map(final, (2, 2))  # as timm: the format is that of the intermediates
    assert torch.equal(last, normed(model, plain[3]))
    for one, other in zip(maps, [*plain[:3], last], strict=True):
        assert torch.equal(one, other.permute(0, 2, 3, 1))
    if not isinstance(model.norm, nn.Identity):
        assert not torch.allclose(last, plain[3])


@in_inference
def test_intermediates__stop_early_skips_the_rest(model, images):
    _, maps = model.forward_intermediates(images)
    ran = Counter()
    for i, stage in enumerate(model.stages):
        stage.register_forward_hook(lambda *_, i=i: ran.update([i]))
    final, taken = model.forward_intermediates(images, indices=[1], stop_early=True)
    assert ran == {0: 1, 1: 1}
    assert torch.equal(final, maps[1]) and torch.equal(taken[0], maps[1])
    model.forward_intermediates(images, indices=[1])
    assert ran == {0: 2, 1: 2, 2: 1, 3: 1}
    final, _ = model.forward_intermediates(images, indices=[3], stop_early=True)
    assert torch.equal(model.as_map(final, (2, 2)), normed(model, maps[3]))


@each_kind
def test_intermediates__what_is_not_there_is_refused(template):
    call, images, errors = template.forward_intermediates, torch.zeros(1, 3, 32, 32), (AssertionError, ValueError)
    for fmt in ("NLC", "nchw", ""):
        refused(f"^unknown output_fmt '{fmt}'; .*expected one of NCHW, NHWC$", call, images, output_fmt=fmt)
    for indices in ([4], [-5], 5, 0):
        refused("out of range", call, images, error=errors, indices=indices)


@each_kind
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("indices", "taken"), [([0, 2], [0, 2]), ((1, -1), [1, 3]), (1, [3]), ((1, 0), [1, 0])])
@torch.no_grad()
def test_pruning__keeps_the_chosen_maps(model, images, indices, taken, norm):
    expected = model.forward_intermediates(images, indices=indices, norm=norm, intermediates_only=True)
    before = sum(p.numel() for p in model.parameters())
    assert model.prune_intermediate_layers(indices, prune_norm=not norm) == taken
    assert len(model.stages) == max(taken) + 1 and model.num_classes == 0
    assert sum(p.numel() for p in model.parameters()) < before
    got = model.forward_intermediates(images, indices=taken, norm=norm, intermediates_only=True)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@in_inference
def test_classifier__other_pools_replaced_and_removed(model, images):
    model.reset_classifier(CLASSES, "avg")  # of all but the class token, where there is one
    pooled = model.forward_head(model.forward_features(images), pre_logits=True)
    model.reset_classifier(5)
    assert model.num_classes == 5 and model.get_classifier().weight.shape == (5, model.head_hidden_size)
    assert torch.equal(model.forward_head(model.forward_features(images), pre_logits=True), pooled)
    logits = model(images)
    assert logits.shape == (2, 5) and logits.isfinite().all() and logits.std() > 0
    model.reset_classifier(0)
    assert model.num_classes == 0 and torch.equal(model(images), pooled)
    model.reset_classifier(0, "")
    unpooled = model.as_map(model(images), (2, 2))
    assert unpooled.shape == (2, model.head_hidden_size, 2, 2)
    assert_close(unpooled.mean((2, 3)), pooled, tolerance=1e-6)
    model.reset_classifier(CLASSES, "avg")
    assert model(images).shape == (2, CLASSES)
    model.reset_classifier(0, "")
    unpooled = model.as_map(model(images), (2, 2))
    means, peaks = unpooled.mean((2, 3)), unpooled.amax((2, 3))
    for pool, expected in [("max", peaks), ("avgmax", (means + peaks) / 2), ("avg", means)]:
        model.reset_classifier(0, pool)
        assert_close(model(images), expected, tolerance=1e-6)
        model.reset_classifier(5, pool)
        assert_close(model(images), model.get_classifier()(expected), tolerance=1e-6)


@each_kind
@pytest.mark.parametrize("training", [False, True])
def test_classifier__reset_keeps_device_precision_and_mode(model, training):
    model = model.to("meta", torch.float64).train(training)
    for pool in (None, "max", "", None, "avg"):
        model.reset_classifier(0, pool)
        model.reset_classifier(0 if model.head.global_pool.is_identity() else 5)
        assert all(p.device.type == "meta" and p.dtype == torch.float64 for p in model.parameters())
        assert all(module.training == training for module in model.modules())


@in_inference
def test_classifier__constructor_agrees_with_reset(fresh, images):
    for num_classes, pool in [(0, "avg"), (0, ""), (0, "max")]:
        built = fresh(num_classes=num_classes, global_pool=pool)
        reset = fresh()
        reset.load_state_dict(built.state_dict(), strict=False)
        reset.reset_classifier(num_classes, pool)
        assert torch.equal(built(images), reset(images))
    assert fresh(num_classes=3, global_pool="max")(images).shape == (2, 3)


def test_constructor__device_precision_and_unknown_arguments(name):
    refused("bananas", timm.create_model, name, error=(TypeError, ValueError), bananas=3, device="meta")
    model = shallow(name, device=torch.device("meta"), dtype=torch.float64)
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert {(t.device.type, t.dtype) for t in tensors} == {("meta", torch.float64)}


@each_kind
@pytest.mark.parametrize("in_chans", [1, 4])
@torch.no_grad()
def test_constructor__other_input_channels(fresh, in_chans):
    model = fresh(in_chans=in_chans)
    assert model.in_chans == model.get_submodule(model.default_cfg["first_conv"]).in_channels == in_chans
    images = torch.randn(1, in_chans, 48, 32)
    logits = model(images)
    for channel in range(in_chans):  # every channel is seen
        images[:, channel] += 1
        previous, logits = logits, model(images)
        assert logits.isfinite().all() and not torch.equal(logits, previous)
    refused(rf"expected \(batch, {in_chans}, height, width\)", model, torch.zeros(1, 3, 48, 32))


@each_kind
def test_constructor__weights_depend_on_the_seed_alone(name):
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(shallow(name).state_dict())
    first, again, other = states
    assert all(torch.equal(first[key], again[key]) for key in first)
    matrices = [key for key, p in first.items() if p.ndim > 1 and p.std() > 0 and "prop." not in key]
    assert len(matrices) > 10 and [key for key in matrices if torch.equal(first[key], other[key])] == []


@each_kind
def test_initialisation__after_to_empty(name, fresh, images):
    born = fresh()
    model = shallow(name, num_classes=CLASSES, device="meta").to_empty(device="cpu").eval()
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)
    model.init_weights()
    for key, expected in born.state_dict().items():
        assert state[key].isfinite().all(), key
        if expected.numel() >= 256 and expected.std() > 0:  # drawn: another draw of the same size
            assert state[key].std().item() == pytest.approx(expected.std().item(), rel=0.25), key
            assert (state[key].mean() - expected.mean()).abs() < 0.4 * expected.std(), key
        elif expected.numel() < 2 or expected.std() == 0:
            assert torch.equal(state[key], expected), key
    assert model(images).isfinite().all()


@in_inference
def test_dropout_and_stochastic_depth__act_in_training_alone(fresh, images):
    dropping, keeping = fresh(drop_rate=0.5), fresh()
    assert torch.equal(dropping(images), keeping(images))
    seen = []
    for model in (keeping, dropping):
        model.train().get_classifier().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(images)
    whole, dropped = seen
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert_close(dropped, torch.where(dropped == 0, 0.0, 2 * whole), tolerance=1e-6)
    dropping, keeping = fresh(drop_path_rate=0.8), fresh()
    assert_close(dropping(images), keeping(images), tolerance=1e-5)
    assert_close(keeping.train()(images), keeping(images), tolerance=1e-5)
    dropping.train()
    assert len({tuple(dropping(images).flatten().tolist()) for _ in range(4)}) > 1
    for module in dropping.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    assert_close(dropping(images), keeping(images), tolerance=1e-5)


@each_name
def test_lookups__stochastic_depth_grows_linearly_and_what_is_not_decayed_exists(blank):
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in blank.stages for block in stage.blocks]
    assert len(rates) > 4
    assert rates == pytest.approx(torch.linspace(0, 0.3, len(rates)).tolist())
    assert blank.no_weight_decay() <= {key for key, _ in blank.named_parameters()}


@each_kind
def test_stochastic_depth__covers_both_branches(fresh, images):
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    model = fresh(drop_path_rate=0.5)
    for block in (block for stage in model.stages for block in stage.blocks):
        block.drop_path = Nothing()
    model.reset_classifier(CLASSES, "avg")  # a class token would see no image
    moved = {name for name, gradient in gradients(model, images).items() if gradient is not None and gradient.any()}
    assert {name for name in moved if ".blocks." in name and ".cpe." not in name and ".peg." not in name} == set()
    assert {name.partition(".")[0] for name in moved} >= {"stem", "stages", "head"}


def test_gradients__reach_every_parameter(fresh, model, images):
    at_birth = gradients(fresh(), images)
    assert [name for name, gradient in at_birth.items() if gradient is None] == []
    still = [name for name, gradient in at_birth.items() if not gradient.any()]
    # Offsets start at zero through zero weights, so what produces them moves from the second step on.
    assert [name for name in still if ".offset_dw." not in name] == []
    assert [name for name, gradient in gradients(model, images).items() if not gradient.any()] == []


@each_kind
def test_checkpointing__changes_neither_outputs_nor_gradients_nor_random_depth(model, images, fresh):
    plain, checkpointed = model.train(), deepcopy(model).train()
    runs = Counter()
    for stage in checkpointed.stages:
        stage.blocks[0].register_forward_pre_hook(lambda module, _: runs.update([module]))
    checkpointed.set_grad_checkpointing()
    assert_close(checkpointed(images), plain(images), tolerance=1e-6)
    runs.clear()
    expected = gradients(plain, images)
    assert_all_close(gradients(checkpointed, images), expected, 1e-5)
    assert list(runs.values()) == [2] * 4  # once forward, once more for backward
    checkpointed.set_grad_checkpointing(False)
    runs.clear()
    gradients(checkpointed, images)
    assert list(runs.values()) == [1] * 4
    models = [fresh(drop_path_rate=0.5, drop_rate=0.2) for _ in range(2)]
    models[1].set_grad_checkpointing()
    results = []
    for model in models:
        torch.manual_seed(5)
        results.append(gradients(model, images))
    assert_all_close(*results, 1e-5)


@each_name
def test_groups__follow_the_depth(blank):
    groups = group_parameters(blank, blank.group_matcher(), reverse=True)
    assert groups.keys() == {key for key, _ in blank.named_parameters()}
    stem = {group for key, group in groups.items() if key.startswith("stem.")}
    head = {group for key, group in groups.items() if key.startswith("head.")}
    assert stem == {0} and head == {max(groups.values())}
    assert {group for key, group in groups.items() if not key.startswith(("stem.", "head."))}.isdisjoint(stem | head)
    last = 0
    for i, stage in enumerate(blank.stages):
        for j, block in enumerate(stage.blocks):
            (group,) = {groups[f"stages.{i}.blocks.{j}.{key}"] for key, _ in block.named_parameters()}
            assert group > last
            last = group
        downsample = {groups[f"stages.{i}.downsample.{key}"] for key, _ in stage.downsample.named_parameters()}
        assert downsample <= {groups[f"stages.{i}.blocks.0.{key}"] for key, _ in stage.blocks[0].named_parameters()}
    coarse = group_parameters(blank, blank.group_matcher(coarse=True), reverse=True)
    for key, group in coarse.items():
        part, _, rest = key.partition(".")
        expected = {"stem": 0, "stages": 1 + int(rest[0]) if rest[0].isdigit() else None, "norm": 4, "head": 5}[part]
        assert group == expected, key


@each_kind
def test_layer_decay__optimizer_steps(model, images):
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.1, layer_decay=0.5)
    names = {p: key for key, p in model.named_parameters()}
    assert Counter(p for group in optimizer.param_groups for p in group["params"]) == dict.fromkeys(names, 1)
    scales = {names[p]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert {scale for key, scale in scales.items() if key.startswith("head.")} == {1.0}
    stem = {scale for key, scale in scales.items() if key.startswith("stem.")}
    assert len(stem) == 1 and stem < {min(scales.values()), 1.0}
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed and model.no_weight_decay().isdisjoint(decayed)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    gradients(model, images)
    optimizer.step()
    assert [key for key, p in model.named_parameters() if torch.equal(p, before[key])] == []


@in_inference
def test_copies__are_equal_also_from_a_local_folder(name, model, images, tmp_path):
    expected = model(images)
    assert torch.equal(model(images), expected)
    assert torch.equal(deepcopy(model)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(images), expected)
    other = shallow(name, num_classes=CLASSES).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images), expected)
    save_for_hf(model, tmp_path, model_args=dict(depths=DEPTHS, num_classes=CLASSES), safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(loaded) is type(model) and torch.equal(loaded(images), model(images))


@pytest.fixture(scope="module")
def checkpoint(name, tmp_path_factory) -> tuple[Path, nn.Module]:
    """A file with the weights of a model of the published 1000 classes, and that model."""
    torch.manual_seed(0)
    model = randomize(shallow(name)).eval()
    path = tmp_path_factory.mktemp(name) / "model.safetensors"
    save_file(model.state_dict(), path)
    return path, model


def load(name: str, path: Path, **kwargs) -> nn.Module:
    return shallow(name, pretrained=True, pretrained_cfg_overlay=dict(file=str(path)), **kwargs).eval()


@in_inference
def test_pretrained__same_model_another_task_grey_images_and_features(name, checkpoint, images, tmp_path):
    path, saved = checkpoint
    torch.save(saved.state_dict(), tmp_path / "model.pth")
    for file in (path, tmp_path / "model.pth"):
        assert torch.equal(load(name, file)(images), saved(images))
        assert torch.equal(shallow(name, checkpoint_path=str(file)).eval()(images), saved(images))
    features = saved.forward_features(images)
    pooled = saved.forward_head(features, pre_logits=True)
    other = load(name, path, num_classes=5)
    assert torch.equal(other.forward_head(other.forward_features(images), pre_logits=True), pooled)
    assert other(images).shape == (2, 5)
    assert torch.equal(load(name, path, num_classes=0)(images), pooled)
    assert torch.equal(load(name, path, num_classes=0, global_pool="").forward_features(images), features)
    path, saved = checkpoint
    grey = images[:, :1]
    assert_close(load(name, path, in_chans=1)(grey), saved(grey.expand(-1, 3, -1, -1)), tolerance=1e-5)
    path, saved = checkpoint
    maps = load(name, path, features_only=True, out_indices=(0, 2))(images)
    expected = saved.forward_intermediates(images, indices=(0, 2), intermediates_only=True)
    for got, plain in zip(maps, expected, strict=True):
        if isinstance(saved, PartialFormer):  # its extra norms for dense prediction start as plain ones
            plain = nn.functional.layer_norm(plain.permute(0, 2, 3, 1), plain.shape[1:2], eps=1e-6).permute(0, 3, 1, 2)
        assert_close(got, plain, tolerance=1e-5)


@each_kind
@pytest.mark.parametrize("wrong", ["missing", "unexpected", "misshapen"])
def test_pretrained__wrong_file_is_refused(name, checkpoint, wrong, tmp_path):
    state, key = checkpoint[1].state_dict(), "stages.2.blocks.0.mlp.fc1.weight"
    if wrong == "unexpected":
        key = "stages.2.blocks.7.mlp.fc1.weight"
        state[key] = torch.zeros(2, 2)
    else:
        cut = state.pop(key)[:-1].clone()
        state |= {key: cut} if wrong == "misshapen" else {}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    refused(key, load, name, path, error=RuntimeError)
    refused(key, shallow, name, error=RuntimeError, checkpoint_path=str(path))
