"""Multi-token attention pooling against golden tensors and against the loop over groups in benchmarks/."""

import copy
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import broadsight
from broadsight.deployment import prepare
from broadsight.layers import MultiTokenPool
from broadsight.layers.pooling.multi_token_pool import class_attention_pool
from broadsight.losses import MultiTokenLoss
from broadsight.weights.released_stvit import released_tensors
from tests.compare import assert_all_close, assert_close, randomize
from tests.refusals import refused

_path = Path(__file__).parents[3] / "benchmarks" / "per_group_map.py"
_spec = importlib.util.spec_from_file_location("per_group_map", _path)
per_group_map = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(per_group_map)

GOLDEN_HEADS = ["paper_r50", "release_r50", "convnext", "pit", "mobilenet", "nogram", "ga", "fastervit"]

# Small, but with everything on; the tests below change what they are about.
USUAL = dict(level=3, dim=24, groups=2, tokens=4, gram_groups=12, attn_dim=12, heads=3, head_mixing=True)
CHANNELS = (6, 10, 12, 16, 20)
SIZES = ((32, 32), (16, 16), (8, 8), (4, 4), (2, 2))


def pyramid(batch: int = 4, channels=CHANNELS, sizes=SIZES, dtype=torch.float32) -> list[Tensor]:
    return [torch.randn(batch, c, *size, dtype=dtype) for c, size in zip(channels, sizes, strict=True)]


def usual_pool(channels=CHANNELS, num_classes: int = 10, **changes) -> MultiTokenPool:
    return randomize(MultiTokenPool(channels, num_classes, **(USUAL | changes))).eval()


def pair(channels, num_classes: int = 7, **arguments) -> tuple[MultiTokenPool, nn.Module]:
    """Ours and the loop over groups, in float64, with the same weights, none of them at an initial value."""
    reference = randomize(per_group_map.PerGroupPool(channels, num_classes, **arguments).double())
    for name, buffer in reference.named_buffers():
        if name.endswith("bp_reduction.1.running_var"):
            buffer *= 0.01  # Gram entries are small; at unit variance the tokens would hardly depend on the image
    ours = MultiTokenPool(channels, num_classes, **arguments).double()
    broadsight.load_release(ours, reference.state_dict())
    return ours, reference


def pool_of(config: dict) -> MultiTokenPool:
    names = dict(dim="dim", level="level", gram="gram", gram_dim="gram_dim", gram_groups="gram_groups")
    names |= dict(groups="n_groups", tokens="n_tokens", mean_token="mean_token", attn_dim="attn_dim", heads="num_heads")
    names |= dict(mlp_ratio="mlp_ratio", mlp_groups="mlp_groups", head_mixing="head_mixing", classifier="head")
    arguments = {ours: config[theirs] for ours, theirs in names.items()}
    return MultiTokenPool(config["channels"], config["num_classes"], drop=0.0, **arguments)


class Golden:
    """A golden head file in one precision, our pool with its weights, and its feature maps."""

    def __init__(self, file: tuple[dict[str, Tensor], dict], dtype: torch.dtype):
        tensors, config = file
        self.tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        self.groups, self.mean_token = config["n_groups"], config["mean_token"]
        self.weights = {name[3:]: x for name, x in self.tensors.items() if name.startswith("sd.")}
        self.pool = broadsight.load_release(pool_of(config).to(dtype), self.weights)
        self.features = [self.tensors[f"in.feat{i}"] for i in range(len(config["channels"]))]
        # The files hold float32 roundings of a float64 run.
        self.tolerance = 2e-5 if dtype == torch.float32 else 3e-7

    def check(self, got: Tensor, name: str) -> None:
        expected = self.tensors[name] if name in self.tensors else self.by_group(name)
        assert_close(got, expected, name, self.tolerance)

    def by_group(self, name: str) -> Tensor:
        return torch.stack([self.tensors[f"{name}.g{g}"] for g in range(self.groups)], 1)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def golden_head(golden, request):
    return lambda name: Golden(golden(f"map_{name}"), request.param)


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden__inference(golden_head, name):
    file = golden_head(name)
    pool, features = file.pool.eval(), file.features
    with torch.no_grad():
        merged = pool.merge_maps(features)
        logits = pool.forward_groups(features, per_token=True)
        got = {"merged": merged, "init_tokens": pool.initial_tokens(merged), "tokens": pool.attended_tokens(merged)}
        for what, x in {**got, "logits": logits.tokens, "agg": pool(features)}.items():
            file.check(x, f"eval.{what}")
        if "eval.token_logits.g0" in file.tensors:
            file.check(logits.per_token, "eval.token_logits")
        assert pool.forward_groups(features).per_token is None
        if not file.mean_token:
            assert logits.average is None
            return
        file.check(logits.average, "eval_light.logits")
        pool.lighten()
        file.check(pool(features), "eval_light.agg")
        file.check(pool.forward_groups(features).average, "eval_light.logits")


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden__training_step(golden_head, name):
    file = golden_head(name)
    pool, features = file.pool.train(), [x.requires_grad_() for x in file.features]
    logits = pool.forward_groups(features)
    file.check(logits.tokens, "train.logits")
    assert (logits.average is None) != file.mean_token
    if file.mean_token:
        file.check(logits.average, "train.avg")
    state = released_tensors(pool, pool.state_dict())
    statistics = [key for key in file.tensors if key.startswith("post.")]
    assert statistics
    for key in statistics:
        file.check(state[key.removeprefix("post.")], key)

    loss = MultiTokenLoss("bce")(logits, file.tensors["loss.target"])
    file.check(loss, "loss.total_bce")
    loss.backward()
    for i, x in enumerate(features):
        assert (x.grad is None) != (f"grad.bce.feat{i}" in file.tensors)
        if x.grad is not None:
            file.check(x.grad, f"grad.bce.feat{i}")
    gradients = released_tensors(pool, {name: p.grad for name, p in pool.named_parameters()})
    prefix = "grad.bce.sd."
    expected = {key.removeprefix(prefix): x for key, x in file.tensors.items() if key.startswith(prefix)}
    assert gradients.keys() == expected.keys()
    # Sums of large terms that cancel keep the rounding of the terms, so that the file's largest gradient is the scale.
    largest = max(x.abs().max() for x in expected.values())
    for key, gradient in gradients.items():
        assert gradient.shape == expected[key].shape, key
        assert (gradient - expected[key]).abs().max() <= file.tolerance * largest, key


def test_golden__class_attention_pooling(golden):
    tensors, config = golden("map_cap")
    cap = class_attention_pool(config["dim"], config["num_heads"])
    pool = MultiTokenPool((config["dim"],), config["num_classes"], **cap).eval()
    broadsight.load_release(pool, {name[3:]: x for name, x in tensors.items() if name.startswith("sd.")})
    x = tensors["in.feat0"]
    assert_close(pool([x]), tensors["eval.logits"], "logits", 2e-5)
    assert_close(pool.attended_tokens(pool.merge_maps([x])).flatten(1), tensors["eval.pooled"], "pooled", 2e-5)


def assert_same_as_the_loop(ours: MultiTokenPool, reference: nn.Module, features: list[Tensor]) -> None:
    """Logits and gradients, once with frozen statistics and once in training, and the statistics that leaves."""
    for training in (False, True):
        ours.train(training)
        reference.train(training)
        logits, map_gradients, gradients = logits_and_gradients(ours, features)
        expected_logits, expected_map_gradients, expected_gradients = logits_and_gradients(reference, features)
        assert_all_close(logits, expected_logits)
        assert_all_close(dict(enumerate(map_gradients)), dict(enumerate(expected_map_gradients)), 1e-8)
        assert_all_close(released_tensors(ours, gradients), expected_gradients, 1e-8)
    state = released_tensors(ours, ours.state_dict())
    statistics = {name: x for name, x in reference.named_buffers() if not name.endswith("bp_index")}
    assert_all_close({name: state[name] for name in statistics}, statistics)


def logits_and_gradients(pool: nn.Module, features: list[Tensor]) -> tuple[dict, list[Tensor], dict]:
    """Everything the pool can say, and the gradients of a fixed random projection of it: by map, by parameter."""
    leaves = [x.detach().clone().requires_grad_() for x in features]
    logits = pool.forward_groups(leaves, per_token=True)._asdict() | {"aggregate": pool(leaves)}
    logits = {name: y for name, y in logits.items() if y is not None}
    draw = torch.Generator().manual_seed(1)
    projection = sum((torch.randn(y.shape, generator=draw, dtype=y.dtype) * y).sum() for y in logits.values())
    parameters = dict(pool.named_parameters())
    wanted = [*leaves, *parameters.values()]
    gradients = torch.autograd.grad(projection, wanted, allow_unused=True, materialize_grads=True)
    by_parameter = dict(zip(parameters, gradients[len(leaves) :], strict=True))
    return {name: y.detach() for name, y in logits.items()}, list(gradients[: len(leaves)]), by_parameter


FULL = (CHANNELS, SIZES)
OTHER_WIDTH = ((5, 30), ((8, 8), (3, 4)))
SAME_WIDTH = ((5, 24), ((8, 8), (3, 4)))
NON_SQUARE = ((6, 8, 10, 14, 14), ((24, 40), (12, 20), (6, 10), (3, 5), (3, 5)))
NON_INTEGER = ((9, 9, 12, 20), ((13, 17), (13, 17), (7, 9), (4, 5)))


@pytest.mark.parametrize(
    ("maps", "arguments"),
    [
        (FULL, {}),
        (FULL, dict(head_mixing=False)),
        (FULL, dict(level=4)),
        (FULL, dict(level=1)),
        (OTHER_WIDTH, dict(level=-1)),
        (SAME_WIDTH, dict(level=0)),
        (SAME_WIDTH, dict(level=0, gram=False, mean_token=False, tokens=1)),
        (FULL, dict(tokens=1, mean_token=False, groups=5, head_mixing=False)),
        (FULL, dict(groups=1, mean_token=False)),
        (FULL, dict(gram=False)),
        (NON_SQUARE, dict(groups=3, tokens=3)),
        (NON_INTEGER, dict(level=2)),
        (NON_INTEGER, dict(level=3, head_mixing=False)),
        (FULL, dict(classifier="linear")),
        (FULL, dict(gram_dim=15, gram_groups=6)),
        (FULL, dict(gram_dim=32, gram_groups=16)),
        (FULL, dict(attn_dim=30, heads=5, mlp_groups=1)),
        (FULL, dict(attn_dim=None, heads=1, mlp_groups=3, mlp_ratio=2)),
        (FULL, dict(mlp_ratio=1, gram_groups=1)),
    ],
)
def test_agrees_with_the_loop_over_groups(maps, arguments):
    channels, sizes = maps
    ours, reference = pair(channels, **(USUAL | dict(drop=0.0) | arguments))
    assert_same_as_the_loop(ours, reference, pyramid(5, channels, sizes, torch.float64))


@st.composite
def heads(draw):
    """Channels, sizes and arguments that divide as they must."""
    dim = draw(st.sampled_from([6, 12, 16, 18]))
    arguments = dict(dim=dim, groups=draw(st.integers(1, 4)), mean_token=draw(st.booleans()), drop=0.0)
    gram_dim = draw(st.sampled_from([7, 8, 11, 12]))
    triangle = gram_dim * (gram_dim + 1) // 2
    tokens = draw(st.sampled_from([t for t in range(1, 7) if triangle % t == 0]))
    common = math.gcd(triangle, dim * tokens)
    gram_groups = draw(st.sampled_from([r for r in range(1, common + 1) if common % r == 0]))
    arguments |= dict(tokens=tokens, gram=draw(st.booleans()), gram_dim=gram_dim, gram_groups=gram_groups)
    attn_dim = draw(st.sampled_from([None, 4, 12, 20]))
    width = attn_dim or dim
    arguments |= dict(attn_dim=attn_dim, heads=draw(st.sampled_from([h for h in range(1, 7) if width % h == 0])))
    arguments |= dict(mlp_ratio=draw(st.integers(1, 4)), head_mixing=draw(st.booleans()))
    arguments |= dict(mlp_groups=draw(st.sampled_from([k for k in (1, 2, 3) if dim % k == 0])))
    arguments |= dict(classifier=draw(st.sampled_from(["norm", "linear"])))
    count = draw(st.integers(1, 4))
    channels = draw(st.lists(st.sampled_from([3, 5, dim]), min_size=count, max_size=count))
    # Which way a map is resized is read off its height alone, so that heights and widths grow together here.
    heights = sorted(draw(st.lists(st.integers(2, 11), min_size=count, max_size=count)), reverse=True)
    wider = draw(st.integers(0, 3))
    arguments |= dict(level=draw(st.integers(-1, count - 1)))
    return channels, [(height, height + wider) for height in heights], arguments


@settings(max_examples=25, deadline=None, derandomize=True)
@given(heads())
def test_agrees_with_the_loop_over_groups__drawn(head):
    channels, sizes, arguments = head
    torch.manual_seed(0)
    ours, reference = pair(channels, **arguments)
    assert_same_as_the_loop(ours, reference, pyramid(5, channels, sizes, torch.float64))


def test_second_derivatives_agree_with_the_loop():
    ours, reference = pair(CHANNELS, **USUAL)
    features = [x.requires_grad_() for x in pyramid(2, dtype=torch.float64)]

    def second(pool: nn.Module) -> dict:
        gradients = torch.autograd.grad(pool.eval()(features).square().sum(), features, create_graph=True)
        return dict(enumerate(torch.autograd.grad(sum(x.square().sum() for x in gradients), features)))

    assert_all_close(second(ours), second(reference), 1e-8)


@pytest.mark.parametrize("head_mixing", [False, True])
def test_dropout_has_the_distribution_of_the_loop(head_mixing):
    arguments = dict(level=0, dim=8, groups=2, tokens=2, gram=False, heads=2, head_mixing=head_mixing, drop=0.3)
    ours, reference = pair((8,), 5, **arguments)
    weights = reference.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attn.v.bias", "norm1.bias")):
            weight += 2.0  # what dropout takes from the sum of the weights shows in the constant part of the values
    broadsight.load_release(ours, weights)
    draws = 6000
    features = [torch.randn(1, 8, 3, 4, dtype=torch.float64).expand(draws, -1, -1, -1)]
    with torch.no_grad():
        got, expected = (pool.train().forward_groups(features) for pool in (ours, reference))
    for one, other in zip(got[:2], expected[:2], strict=True):
        spread = other.std(0)
        assert (one.mean(0) - other.mean(0)).abs().div(spread).max() < 6 * (2 / draws) ** 0.5
        assert (one.std(0) / spread - 1).abs().max() < 0.08


def test_logits__of_groups_are_averaged_and_those_of_tokens_add_up_but_for_the_bias():
    pool, features = usual_pool(drop=0.0), pyramid()
    for training in (False, True):
        pool.train(training)
        assert_close(pool(features), pool.forward_groups(features).tokens.mean(1), tolerance=1e-5)
    logits = pool.eval().forward_groups(features, per_token=True)
    assert logits.per_token.shape == (4, 2, 4, 10)
    bias = logits.tokens - logits.per_token.sum(2)
    torch.testing.assert_close(bias, bias[:1].expand_as(bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize("classifier", ["norm", "linear"])
def test_light(classifier):
    pool, features = usual_pool(classifier=classifier), pyramid()
    expected = pool.forward_groups(features).average
    count = sum(p.numel() for p in pool.parameters())
    pool.lighten()
    assert pool.light
    norm = 2 * 24 * 4 if classifier == "norm" else 0
    assert count - sum(p.numel() for p in pool.parameters()) == 2 * (norm + 24 * 4 * 10 + 10)
    assert_close(pool(features), expected.mean(1), tolerance=1e-5)
    logits = pool.forward_groups(features)
    assert logits.tokens is None and logits.per_token is None
    assert_close(logits.average, expected, tolerance=1e-5)
    built = MultiTokenPool(CHANNELS, 10, **USUAL, classifier=classifier, light=True).eval()
    built.load_state_dict(pool.state_dict())
    assert torch.equal(built(features), pool(features))


def test_reset_classifier_and_default_gram_groups():
    pool, features = usual_pool(), pyramid()
    tokens = pool.attended_tokens(pool.merge_maps(features))
    for classes, width in [(7, 7), (0, 2 * 4 * 24), (3, 3)]:
        pool.reset_classifier(classes)
        assert (pool.num_classes, pool(features).shape) == (classes, (4, width))
        assert not classes or pool.forward_groups(features).average.shape == (4, 2, classes)
    assert torch.equal(pool.attended_tokens(pool.merge_maps(features)), tokens)
    # The channel groups of the Gram matrix have a default that divides.
    for dim, tokens in [(24, 4), (24, 3), (48, 2), (36, 6), (20, 1)]:
        pool = MultiTokenPool((8, 8), 5, level=1, dim=dim, groups=2, tokens=tokens, heads=4).eval()
        assert pool(pyramid(2, (8, 8), ((8, 8), (4, 4)))).shape == (2, 5)


@pytest.mark.parametrize(
    ("channels", "changes"),
    [(CHANNELS, {}), (CHANNELS, dict(light=True, head_mixing=False)), ((5, 30), dict(level=-1, gram=False))],
)
def test_fused_is_the_same_function(channels, changes):
    pool = usual_pool(channels, **changes).double()
    features = pyramid(3, channels, SIZES[: len(channels)], torch.float64)
    fused = broadsight.fuse(pool)
    assert_close(fused(features), pool(features).detach())
    assert len(operations(fused, features)) < len(operations(pool, features))


def test_memory_format_does_not_matter():
    pool, features = usual_pool().double(), pyramid(dtype=torch.float64)
    expected, expected_maps, expected_gradients = logits_and_gradients(pool, features)
    wide = [torch.stack([x, torch.randn_like(x)], -1).flatten(3) for x in features]
    last = [x.to(memory_format=torch.channels_last) for x in features]
    strided = [x[..., ::2] for x in wide]
    for other in (last, strided, [last[0], *features[1:3], *strided[3:]]):
        got, maps, gradients = logits_and_gradients(pool, other)
        assert_all_close(got, expected)
        assert_all_close(dict(enumerate(maps)), dict(enumerate(expected_maps)))
        assert_all_close(gradients, expected_gradients, 1e-8)


@pytest.mark.parametrize("training", [False, True])
def test_frozen_parts_change_no_other_gradient(training):
    pool, features = usual_pool(drop=0.0).double().train(training), pyramid(dtype=torch.float64)

    def gradients(*wanted: bool) -> tuple[dict, dict]:
        pool.zero_grad()
        pool.requires_grad_(wanted[0])
        leaves = [x.clone().requires_grad_(wanted[1]) for x in features]
        pool(leaves).sum().backward()
        of_pool = {name: p.grad for name, p in pool.named_parameters() if p.grad is not None}
        return of_pool, dict(enumerate(x.grad for x in leaves))

    of_pool, of_maps = gradients(True, True)
    assert_all_close(gradients(True, False)[0], of_pool)
    assert_all_close(gradients(False, True)[1], of_maps)


def test_batch_equals_images_and_nothing_is_remembered_of_earlier_sizes():
    pool, features = usual_pool().double(), pyramid(6, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.cat([pool([x[i : i + 1] for x in features]) for i in range(6)])
        assert_close(pool(features), expected, "logits", 1e-11)
    fresh = usual_pool().double()
    pool = copy.deepcopy(fresh)
    for tall, wide in ((1, 1), (2, 3), (1, 2), (1, 1)):
        sizes = [(tall * height, wide * width) for height, width in SIZES]
        features = pyramid(2, sizes=sizes, dtype=torch.float64)
        assert torch.equal(pool(features), copy.deepcopy(fresh)(features))
        assert pool.merge_maps(features).shape == (2, 24, *sizes[3])


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_bfloat16(training, autocasts):
    pool, features = usual_pool(drop=0.0).train(training), pyramid(8)
    expected, half = copy.deepcopy(pool)(features), pool if autocasts else copy.deepcopy(pool).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        got = half(features if autocasts else [x.bfloat16() for x in features])
    # Eight bits of mantissa through a dozen layers: a few per cent of the largest logit.
    assert (got.float() - expected).abs().max() <= 0.05 * expected.abs().max()
    assert autocasts or got.dtype == torch.bfloat16
    got.float().square().sum().backward()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in half.parameters())


class Operations(TorchDispatchMode):
    """Collects the operations that compute or copy, each with its result."""

    FREE = ("_unsafe_view", "_reshape_alias", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, object]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        self.seen += [] if function.is_view or name in self.FREE else [(name, result)]
        return result


def operations(pool: nn.Module, features: list[Tensor]) -> list[tuple[str, object]]:
    with torch.no_grad():
        pool(features)  # whatever is computed once is computed now
        with Operations() as mode:
            pool(features)
    return mode.seen


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("head_mixing", [False, True])
def test_operations_do_not_grow_with_the_groups(head_mixing, light):
    pools = (usual_pool(groups=groups, head_mixing=head_mixing, light=light) for groups in (2, 4, 8))
    (count,) = {len(operations(pool, pyramid(2))) for pool in pools}
    assert count <= 80


def test_no_keys_and_values_are_formed():
    arguments = dict(level=2, dim=24, groups=2, tokens=4, gram_dim=8, gram_groups=12, attn_dim=60, heads=3)
    ours, reference = pair((8, 10, 12), **arguments)
    features = pyramid(2, (8, 10, 12), ((32, 32), (16, 16), (8, 8)), torch.float64)
    products = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")
    keys = 2 * 64 * 60  # one group's keys of the image; every other product of this head is smaller

    def largest(pool: nn.Module) -> int:
        return max(result.numel() for name, result in operations(pool.eval(), features) if name in products)

    assert largest(reference) >= keys
    assert largest(ours) < keys


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (dict(tokens=7), (300, 7)),  # 24 * 25 / 2 entries of the triangle
        (dict(gram_groups=9), (300, 9)),
        (dict(tokens=1, gram_groups=5), (24, 5)),  # 5 divides 300, but not the 24 outputs
        (dict(heads=5), (12, 5)),
        (dict(mlp_groups=5), (24, 5)),
        (dict(level=5), (5,)),
        (dict(classifier="cosine"), ("cosine",)),
        (dict(mean_token=False, light=True), ("light", "mean_token")),
    ],
)
def test_wrong_arguments_are_refused(changes, numbers):
    assert_says(numbers, MultiTokenPool, CHANNELS, 10, **(USUAL | changes))


@pytest.mark.parametrize("level", [3, -1])
def test_wrong_feature_maps_are_refused(level):
    pool, features = usual_pool(level=level), pyramid()
    assert_says((4, 5), pool, features[1:])
    assert_says((20, 21), pool, [*features[:4], torch.randn(4, 21, 2, 2)])
    refused("mean_token", usual_pool(level=level, mean_token=False).lighten)


def assert_says(words: tuple, call, *arguments, **options) -> None:
    message = refused("", call, *arguments, **options)
    assert all(str(word) in message for word in words), message


@pytest.mark.parametrize("training", [False, True])
def test_compiles_into_one_graph(training):
    torch._dynamo.reset()
    eager, features = usual_pool(drop=0.0).double().train(training), pyramid(dtype=torch.float64)
    pool = copy.deepcopy(eager)
    compiled = torch.compile(pool, fullgraph=True, backend="eager")
    assert_close(compiled(features), eager(features))
    for (name, one), other in zip(pool.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_exports__full_light_and_any_size():
    features = pyramid(dtype=torch.float64)
    for pool in (usual_pool(light=True).double(), usual_pool().double()):
        assert_close(torch.export.export(pool, (features,)).module()(features), pool(features))
    free = [dict.fromkeys((0, 2, 3), Dim.AUTO) for _ in features]
    exported = torch.export.export(prepare(pool), (features,), dynamic_shapes=(free,)).module()
    larger = pyramid(3, sizes=[(2 * height, 2 * width) for height, width in SIZES], dtype=torch.float64)
    for x in (features, larger):
        assert_close(exported(x), pool(x))
