"""Compares a module of ours with its slow reference: outputs, and gradients of the inputs and of every parameter."""

import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool

import torch
from torch import Tensor, nn

Outputs = Tensor | Sequence[Tensor]
call: Callable[..., Outputs] = nn.Module.__call__


def assert_same_function(
    ours: nn.Module, reference: nn.Module, *inputs: Tensor, run_ours=call, run_reference=call, tolerance: float = 1e-9
) -> None:
    """Give the reference our weights, run both on the same inputs, and compare values and gradients."""
    reference.load_state_dict(ours.state_dict())
    got, got_gradients = outputs_and_gradients(ours, run_ours, inputs)
    expected, expected_gradients = outputs_and_gradients(reference, run_reference, inputs)
    assert_all_close(dict(enumerate(got)), dict(enumerate(expected)), tolerance)
    assert_all_close(got_gradients, expected_gradients, tolerance)


def assert_equal_to(slow: Callable, module: nn.Module, *inputs: Tensor, run=call, tolerance: float = 1e-11) -> None:
    """The module against a function of the module and its inputs, in value and in every gradient."""
    (got,), got_gradients = outputs_and_gradients(module, run, inputs)
    (expected,), expected_gradients = outputs_and_gradients(module, slow, inputs)
    assert_all_close({"output": got, **got_gradients}, {"output": expected, **expected_gradients}, tolerance)


def saved_bytes(function: Callable[[], object]) -> int:
    """What a call keeps for the backward pass; storages that are shared count once."""
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()  # noqa: F841  storages stay alive, so that no address is used twice
    return sum(saved.values())


def outputs_and_gradients(
    module: nn.Module, run: Callable[..., Outputs], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs for copies of the inputs, and the gradient of a fixed random projection of them, by name."""
    leaves = {f"input {i}": x.detach().clone().requires_grad_() for i, x in enumerate(inputs)}
    outputs = run(module, *leaves.values())
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=draw, dtype=y.dtype) for y in outputs]
    sources = leaves | {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted = list(sources.values())
    gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in outputs], dict(zip(sources, gradients, strict=True))


def assert_close(got: Tensor, expected: Tensor, what: str = "tensor", tolerance: float = 1e-9) -> None:
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    # Some gradients are zero in exact arithmetic (a bias before a norm); the last term is for their rounding.
    allowed = tolerance * expected.abs().max().item() + tolerance / 1e4
    error = (got - expected).abs().max().item()
    assert error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}"


def assert_all_close(got: Mapping, expected: Mapping, tolerance: float = 1e-9) -> None:
    """Tensors by name."""
    assert got.keys() == expected.keys()
    for name, one in got.items():
        assert_close(one, expected[name], str(name), tolerance)


def assert_identical(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Tensors by name, to the last bit."""
    assert got.keys() == expected.keys()
    assert [name for name, one in got.items() if not torch.equal(one, expected[name])] == []


def assert_threads_apart(model: nn.Module, module: str, batches: Sequence[Tensor]) -> list[Tensor]:
    """Two threads, both at a module of a model before either goes on, see nothing of each other; what they should."""
    expected, barrier = [model(x) for x in batches], threading.Barrier(2)
    model.get_submodule(module).register_forward_pre_hook(lambda *_: barrier.wait(60) < 0 or None)
    with ThreadPool(2) as threads:
        got = threads.map(torch.no_grad()(model.forward), batches, chunksize=1)
    assert_all_close(dict(enumerate(got)), dict(enumerate(expected)), 1e-5)
    return expected


@torch.no_grad()
def randomize(module: nn.Module) -> nn.Module:
    """Moves every parameter and statistic off its initial value, so that no term is hidden by a zero or a one."""
    for parameter in module.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        parameter += torch.randn_like(parameter) * (0.5 / fan_in**0.5 if parameter.ndim > 1 else 0.2)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.2 * torch.randn_like(buffer)
        elif name.endswith("running_var"):
            buffer *= 0.5 + torch.rand_like(buffer)
    return module


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def assert_same_model(ours: nn.Module, reference: nn.Module, x: Tensor) -> None:
    """Logits and feature maps of a model, in evaluation mode, in value and gradient."""

    def logits_and_features(model: nn.Module, x: Tensor) -> list[Tensor]:
        features, maps = model.forward_intermediates(x)
        return [model.forward_head(features), *maps]

    theirs = dict(run_reference=lambda model, x: [model(x), *model.features(x)])
    assert_same_function(ours.eval(), reference.eval(), x, run_ours=logits_and_features, **theirs)
    assert_close(ours(x), reference(x), "logits")


def assert_trains_alike(ours: nn.Module, reference: nn.Module, statistics: int) -> None:
    """Gradients in training mode, and then the buffers, of which the reference has so many."""
    x = torch.randn(3, 3, 70, 58, dtype=torch.float64)
    assert_same_function(ours.train(), reference.train(), x, tolerance=1e-8)
    expected = dict(reference.named_buffers())
    assert len(expected) == statistics
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-11, atol=1e-12)


@torch.no_grad()
def assert_bfloat16(model: nn.Module, tolerance: float) -> None:
    x = torch.randn(2, 3, 64, 64)
    expected, got = model.eval()(x), model.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16 and got.isfinite().all()
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
