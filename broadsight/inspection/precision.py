"""Which precision to compute in: what a device can do, what "auto" is on it, and models that are cast to one."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Instructions of CPUs that multiply a type, as torch names them; without them it is emulated.
INSTRUCTIONS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"}}
INSTRUCTIONS |= {"fp16": {"avx512_fp16", "amx_fp16", "fp16_arith"}}


def natively(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The precisions that a device multiplies in hardware."""
    kind = torch.device(device).type
    if kind == "cpu":
        there = {name for name, holds in torch.cpu.get_capabilities().items() if holds is True}
        used = torch.backends.mkldnn.is_available()  # which is what torch reaches them by
        return "fp32", *(name for name, these in INSTRUCTIONS.items() if used and these & there)
    if kind == "mps":
        bf16 = torch.backends.mps.is_macos_or_newer(14, 0)
    else:
        with torch.get_device_module(kind).device(device):
            bf16 = torch.get_device_module(kind).is_bf16_supported(including_emulation=False)
    return ("fp32", "bf16", "fp16") if bf16 else ("fp32", "fp16")


def chosen(asked: str, device: torch.device | str = "cpu") -> str:
    """What a request for a precision means on a device; a ValueError if it cannot be had there."""
    able = natively(device)
    if asked == "auto":
        return "bf16" if "bf16" in able else "fp32"
    kind = torch.device(device).type
    if asked not in able and kind != "cpu":  # where all are emulated
        raise ValueError(f"--precision {asked}, but this {kind} device has {' and '.join(able)}; give one of these")
    return asked


def remark(asked: str, run: Any) -> str:
    """What the user should know of the precision of a run; empty if nobody asked for one."""
    return "" if asked == run.precision == "fp32" else f"{run.title} {words(asked, run.precision, run.device)}"


def words(asked: str, found: str, device: torch.device | str) -> str:
    """The precision that was chosen on a device, and why."""
    emulated = f", which this {torch.device(device).type} has no instructions for: slower than fp32"
    return f"computes in {found}{' (auto)' * (asked == 'auto')}{emulated * (found not in natively(device))}"


def cast(model: nn.Module, precision: str) -> nn.Module:
    """The model itself with weights in a precision; it takes and gives float32 as before."""
    if precision == "fp32":
        return model
    dtype = DTYPES[precision]

    def given(_: Any, images: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.to(dtype) for one in images)

    def found(_: Any, images: Any, answers: Any) -> Any:
        return tree_map(lambda one: one.float(), answers)

    model.to(dtype).register_forward_pre_hook(given)
    model.register_forward_hook(found)
    return model
