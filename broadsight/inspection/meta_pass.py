"""What a model takes, and a pass through it without arithmetic."""

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


def image_size(model: Any) -> tuple[int, int]:
    """(H, W) that the model was built for: its own record of it, or what its weights were trained on."""
    keepers = [getattr(model, name, None) for name in ("patch_embed", "stem")] + [model]
    recorded = [getattr(keeper, "img_size", None) for keeper in keepers]
    recorded.append(getattr(getattr(model, "config", None), "image_size", None))  # of transformers
    trained = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))[-2:]
    return as_pair(next((size for size in recorded if size), trained))


def image_channels(model: Any) -> list[int]:
    """What the first convolution takes, then what the weights were trained on: it may not see the image itself."""
    first = [module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)][:1]
    return [*first, (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3,))[0]]


def takes_text(model: nn.Module) -> bool:
    """Whether a model of transformers reads images and text together."""
    return {"pixel_values", "input_ids", "attention_mask"} <= inspect.signature(model.forward).parameters.keys()


def run_on(model: nn.Module, images: Tensor) -> Any:
    """What a model makes of images (B, C, H, W), with a text of six tokens beside each if it reads one."""
    if not takes_text(model):
        return model(images)
    text = images.new_ones(len(images), 6, dtype=torch.long)
    return model(pixel_values=images, input_ids=text, attention_mask=text)


def as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def copied(pair: Any, model: nn.Module, with_values: bool) -> Any:
    """A copy of the model, or of a tuple of it and what refers to its modules, that may be edited and costs no memory.

    With values it shares the model's tensors, for eval mode without gradients; without, they are on the meta device.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for x in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(x, Tensor):
                blank = x if with_values else x.detach().to("meta").requires_grad_(x.requires_grad)
                parameter = isinstance(x, nn.Parameter) and not with_values
                memo[id(x)] = nn.Parameter(blank, x.requires_grad) if parameter else blank
    return deepcopy(pair, memo)


def idle_parameters(model: nn.Module, outputs: Sequence[Tensor]) -> tuple[str, ...]:
    """Names of the parameters that could learn and that none of its outputs depends on."""
    sources = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        total = torch.stack([x.sum() for x in outputs]).sum()
    gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
    return tuple(name for name, gradient in zip(sources, gradients, strict=True) if gradient is None)


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None, None, None]:
    """Restore the attributes of all modules afterwards: some keep parts of a pass in them."""
    kept = {module: dict(module.__dict__) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in kept.items():
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextmanager
def in_eval_mode(model: nn.Module) -> Generator[None, None, None]:
    """The model is in eval mode and keeps nothing for gradients; every module's own mode is restored."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train()  # some models keep what they computed for inference; they forget it here
        for module, flag in training.items():
            module.training = flag
