"""BatchNorm over two processes is BatchNorm over both their batches: values, statistics and gradients."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from broadsight.layers.folding import inference_form
from broadsight.models.edited import edit
from broadsight.training.synchronise import SharedBatchNorm, synchronise

from .. import zoo
from .runs import new_processes

RANKS = 2
EXACT = dict(rtol=1e-12, atol=1e-12)  # of float64
SMALL_MAP = dict(dim=48, heads=4, groups=2, tokens=2, mlp_dim=96, pool_options=dict(drop=0.0))

# A norm, the shape of the whole batch, and where it is divided among the processes.
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "images": (lambda: nn.BatchNorm2d(5), (6, 5, 4, 3), 3),
    "rows": (lambda: nn.BatchNorm1d(5), (6, 5), 3),
    "sequences": (lambda: nn.BatchNorm1d(5), (6, 5, 7), 3),
    "volumes": (lambda: nn.BatchNorm3d(5), (4, 5, 2, 3, 2), 2),
    "unequal shares": (lambda: nn.BatchNorm2d(5), (6, 5, 4, 3), 5),
    "one row each": (lambda: nn.BatchNorm1d(5), (2, 5), 1),
    "channels last": (lambda: nn.BatchNorm2d(5).to(memory_format=torch.channels_last), (6, 5, 4, 3), 2),
    "timm's with activation": (lambda: BatchNormAct2d(5, act_layer=nn.GELU), (6, 5, 4, 3), 4),
    "timm's without": (lambda: BatchNormAct2d(5, apply_act=False), (6, 5, 4, 3), 4),
    "cumulative average": (lambda: nn.BatchNorm2d(5, momentum=None), (6, 5, 4, 3), 3),
    "momentum of its own": (lambda: nn.BatchNorm2d(5, momentum=0.3, eps=1e-2), (6, 5, 4, 3), 3),
    "not affine": (lambda: nn.BatchNorm2d(5, affine=False), (6, 5, 4, 3), 3),
    "no statistics": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (6, 5, 4, 3), 3),
    "large mean": (lambda: nn.BatchNorm2d(5), (6, 5, 4, 3), 3),
    "frozen": (lambda: nn.BatchNorm2d(5).eval(), (6, 5, 4, 3), 3),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: zoo.shallow(name, num_classes=3, drop_path_rate=0.0) for name in zoo.SMALLEST},
    "test_resnet": lambda: timm.create_model("test_resnet", num_classes=3),
    "test_resnet, map": lambda: edit("test_resnet", pool="map", pool_args=SMALL_MAP, num_classes=3),
    "test_efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=3, drop_path_rate=0.0),
}

Part = tuple[int, int]


def norm_case(name: str) -> tuple[nn.Module, list[Tensor], Tensor, list[Part]]:
    """The norm in its model, two batches, what the loss multiplies the result with, and each process's part."""
    torch.manual_seed(0)
    build, shape, border = NORMS[name]
    model = nn.Sequential(build()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for buffer_name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5 if buffer_name.endswith("var") else -1.0, 1.5)
    batches = [torch.randn(shape, dtype=torch.float64) + (1e4 if name == "large mean" else i) for i in range(2)]
    return model, batches, torch.randn(shape, dtype=torch.float64), [(0, border), (border, shape[0])]


def model_case(name: str) -> tuple[nn.Module, list[Tensor], Tensor, list[Part]]:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    return model, [torch.randn(4, 3, 64, 64, dtype=torch.float64)], torch.randn(4, 3).double(), [(0, 2), (2, 4)]


def learn(model: nn.Module, batches: list[Tensor], weight: Tensor, part: Part = (0, 10**9)) -> dict[str, Any]:
    """What passes over a part of the batches give, and what they leave in the model."""
    rows, outputs, gradients = slice(*part), [], []
    for batch in batches:
        x = batch[rows].clone().requires_grad_()
        output = model(x)
        (output * weight[rows]).sum().backward()
        outputs.append(output.detach())
        gradients.append(x.grad)
    left = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    evaluated = model.eval()(batches[0][rows]).detach()
    return dict(outputs=outputs, inputs=gradients, parameters=left, state=model.state_dict(), evaluated=evaluated)


def low_precision(synchronised: bool = True) -> dict[str, Any]:
    """A pass in mixed precision, whose norms get bfloat16 and keep their statistics in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))
    model = synchronise(model) if synchronised else model
    batch = torch.randn(4, 3, 40, 40) + 3
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
    return dict(output=output.detach(), state=model.state_dict())


def shared_part(case: tuple[nn.Module, list[Tensor], Tensor, list[Part]], rank: int) -> dict[str, Any]:
    model, batches, weight, parts = case
    return learn(synchronise(model), batches, weight, parts[rank])


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    cases = {name: lambda name=name: shared_part(norm_case(name), rank) for name in NORMS}
    cases |= {name: lambda name=name: shared_part(model_case(name), rank) for name in MODELS}
    for name, case in {**cases, "low precision": low_precision}.items():
        try:
            results[name] = case()
        except Exception as error:  # in both processes alike, so that one case does not spoil the others
            results[name] = error
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    new = new_processes()
    children = [new.Process(target=rank_main, args=(rank, folder), daemon=True) for rank in range(RANKS)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(240)
    finally:
        for child in children:
            child.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def found_by(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    for part in ranks:
        if isinstance(part[name], Exception):
            raise part[name]
    return [part[name] for part in ranks]


def check(whole: dict[str, Any], parts: list[dict[str, Any]], **tolerance: float) -> None:
    for key in ("outputs", "inputs"):
        for number, expected in enumerate(whole[key]):
            found = torch.cat([part[key][number] for part in parts])
            torch.testing.assert_close(found, expected, **tolerance)
    if any(name.endswith("running_mean") for name in whole["state"]):  # else each norms its own batch, as torch's do
        torch.testing.assert_close(torch.cat([part["evaluated"] for part in parts]), whole["evaluated"], **tolerance)
    for name, expected in whole["parameters"].items():
        torch.testing.assert_close(sum(part["parameters"][name] for part in parts), expected, **tolerance)
    for part in parts:
        assert list(part["state"]) == list(whole["state"])
        torch.testing.assert_close(part["state"], whole["state"], **tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_model_on_two_processes_is_that_on_the_whole_batch(name, ranks):
    model, batches, weight, _ = model_case(name)
    check(learn(model, batches, weight), found_by(ranks, name), rtol=1e-6, atol=1e-8)


def test_processes_that_do_not_share_have_other_results__and_mixed_precision_keeps_statistics(ranks):
    model, batches, weight, parts = norm_case("images")  # or the tests above would prove nothing
    alone = learn(model, batches, weight, parts[0])
    assert not torch.allclose(alone["outputs"][0], ranks[0]["images"]["outputs"][0], rtol=1e-3)
    expected = low_precision(synchronised=False)
    for part in found_by(ranks, "low precision"):
        torch.testing.assert_close(part["output"], expected["output"], rtol=2e-2, atol=2e-2)  # the dtype too
        torch.testing.assert_close(part["state"], expected["state"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_two_processes_is_that_of_the_whole_batch_and_of_one_torch_s(name, ranks):
    """Whoever has sync_bn in a recipe and one process gets what they would have got without."""
    model, batches, weight, _ = norm_case(name)
    expected = learn(model, batches, weight)
    check(expected, found_by(ranks, name), **(dict(rtol=1e-8, atol=1e-8) if name == "large mean" else EXACT))
    model, batches, weight, _ = norm_case(name)
    check(expected, [learn(synchronise(model), batches, weight)], **EXACT)


@pytest.mark.parametrize("name", [*zoo.KINDS, *(name for name in MODELS if name not in zoo.KINDS)])
def test_every_norm_of_a_model_is_replaced(name):
    model = MODELS[name]() if name in MODELS else zoo.shallow(name)
    keys, norms = list(model.state_dict()), [m for m in model.modules() if isinstance(m, _BatchNorm)]
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    model = synchronise(model)
    left = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert all(isinstance(norm, SharedBatchNorm) for norm in left) and len(left) == len(norms)
    assert list(model.state_dict()) == keys
    assert {parameter.data_ptr() for parameter in model.parameters()} == pointers


def test_what_is_replaced_and_what_stays():
    model = synchronise(timm.create_model("test_resnet"))
    before = list(model.modules())
    assert all(a is b for a, b in zip(synchronise(model).modules(), before, strict=True))  # once
    norm = nn.BatchNorm2d(3)  # used in two places
    model = synchronise(nn.ModuleDict({"a": norm, "b": norm, "c": nn.Sequential(norm)}))
    assert model["a"] is model["b"] is model["c"][0] and isinstance(model["a"], SharedBatchNorm)
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.GroupNorm(1, 3), nn.LayerNorm(3))
    kinds = [type(module) for module in model]
    assert [type(module) for module in synchronise(model)] == kinds
    # Mode and frozen parameters stay, and DistributedDataParallel takes it on CPUs
    shared = SharedBatchNorm(nn.BatchNorm2d(3).eval().requires_grad_(False))
    assert not shared.training and not any(parameter.requires_grad for parameter in shared.parameters())
    assert not isinstance(shared, nn.SyncBatchNorm)
    # Folded products compute with them in evaluation instead of calling the norm
    norm, weight = nn.BatchNorm1d(4).eval(), torch.randn(4, 3)
    nn.init.uniform_(norm.running_mean)
    found, expected = (inference_form(weight, one) for one in (SharedBatchNorm(norm), norm))
    torch.testing.assert_close(found, expected)
