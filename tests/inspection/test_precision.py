"""Which precision "auto" is on machines that are told about here, and what casting changes."""

import platform
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from broadsight.inspection.precision import cast, chosen, natively, words
from tests.refusals import refused

CPUS = [({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False, "l1d_cache_size": 1}, ("fp32",))]
CPUS += [({"avx512_bf16": True}, ("fp32", "bf16")), ({"amx_bf16": True, "amx_fp16": True}, ("fp32", "bf16", "fp16"))]
CPUS += [({"bf16": True, "fp16_arith": True}, ("fp32", "bf16", "fp16")), ({"neon": True, "bf16": False}, ("fp32",))]


@pytest.mark.parametrize(("instructions", "able"), CPUS)
def test_cpu__auto_is_bf16_only_where_there_are_instructions_for_it(instructions, able, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert natively("cpu") == able and chosen("auto") == ("bf16" if "bf16" in able else "fp32")
    assert [chosen(one) for one in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]  # all can be emulated
    emulated = ", which this cpu has no instructions for: slower than fp32" * ("bf16" not in able)
    assert words("bf16", "bf16", "cpu") == "computes in bf16" + emulated
    assert words("auto", "fp32", "cpu") == "computes in fp32 (auto)"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert chosen("auto") == "fp32"


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="asks /proc/cpuinfo")
def test_cpu__this_machine_has_what_linux_says():
    with open("/proc/cpuinfo") as file:
        flags = set(file.read().split())
    assert ("bf16" in natively()) == bool(flags & {"avx512_bf16", "amx_bf16"})


def test_gpu__what_it_cannot_is_refused(monkeypatch):
    new = True  # Ampere, which multiplies it; older ones only emulate it
    module = SimpleNamespace(device=lambda _: nullcontext())
    module.is_bf16_supported = lambda including_emulation: including_emulation or new
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: new)
    assert [chosen(*one) for one in (("auto", "cuda:0"), ("bf16", "cuda"), ("auto", "mps"))] == ["bf16"] * 3
    new = False
    assert [chosen(*one) for one in (("auto", "cuda:0"), ("fp16", "cuda"), ("auto", "mps"))] == ["fp32", "fp16", "fp32"]
    refused("--precision bf16, but this cuda device has fp32 and fp16; give one of these", chosen, "bf16", "cuda")


def test_cast__takes_and_gives_float32_and_computes_in_half():
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)).eval(), []
    images = torch.randn(4, 3, 8, 8)
    expected = model(images)
    assert cast(model, "fp32") is model and model[0].weight.dtype == torch.float32
    model[3].register_forward_hook(lambda _, given, found: seen.append(found.dtype))
    found = cast(model, "bf16")(images)
    assert (seen, found.dtype, model[1].num_batches_tracked.dtype) == ([torch.bfloat16], torch.float32, torch.int64)
    far = (found - expected).abs().max() / expected.abs().max()
    assert 0 < far < 0.02
