"""A pretended accelerator: its tensors lie in the memory of the CPU, but count as another device's, with gradients.

It refuses what CUDA refuses, to mix its tensors with the CPU's and to make arrays of them, and float64, as MPS does. It
keeps account of the answers that were waited for. To be imported before anything is differentiated.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration as registration
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretended"
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
WAITS: Counter[str] = Counter()  # by file and function of ours


class Module(registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        pass


registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())


class Pretended(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "Pretended":
        if inner.dtype == torch.float64 and inner.numel() > 5:  # but for the engine's sums, which MPS has in float32
            raise TypeError("this device has no float64")
        kept = inner.size(), inner.stride(), inner.storage_offset()
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls, *kept, dtype=inner.dtype, device=torch.device(NAME, 0), requires_grad=requires_grad
            )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        found = func.decompose(*args, **kwargs)
        return _run(func, args, kwargs) if found is NotImplemented else found

    def tolist(self) -> Any:
        _wait()
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"a {NAME} tensor has no array; call .cpu() first")

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            copy = Pretended(self.inner.detach().clone(), self.requires_grad)
            memo[id(self)] = (
                torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
            )
        return memo[id(self)]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func._schema.name.removeprefix("aten::"), kwargs.get("device")
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    ours = {id(one.inner): one for one in tensors if isinstance(one, Pretended)}
    others = [one for one in tensors if not isinstance(one, Pretended) and one.ndim]
    copies = name in ("copy_", "_to_copy")
    if others and ours and not copies and "index" not in name:
        raise RuntimeError(f"{name} has {NAME} tensors, and one {tuple(others[0].shape)} of the CPU")
    here = bool(tensors) if device is None else torch.device(device).type == NAME
    back = (
        isinstance(args[1], Pretended) and not isinstance(args[0], Pretended) if name == "copy_" else ours and not here
    )
    if name in WAITING or (copies and back):
        _wait()
    kwargs |= {} if device is None else {"device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    args_inside, kwargs_inside = tree_map_only(Pretended, lambda one: one.inner, (args, kwargs))
    found = func(*args_inside, **kwargs_inside)
    if name == "copy_":
        return args[0]
    return tree_map_only(
        Tensor, lambda one: ours[id(one)] if id(one) in ours else Pretended(one) if here else one, found
    )


def _wait() -> None:
    ours = [one for one in traceback.extract_stack() if "/broadsight/" in one.filename]
    if ours:
        WAITS[f"{ours[-1].filename.rpartition('/')[2]} {ours[-1].name}"] += 1


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _run(torch.ops.aten.copy_.default, (target, source), {})


def _made(func: Any) -> Any:
    return lambda *given, **how: _run(func, given, how)


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_copy_from", _copy, "PrivateUse1")
LIBRARY.impl("empty.memory_format", _made(torch.ops.aten.empty.memory_format), "PrivateUse1")
LIBRARY.impl("empty_strided", _made(torch.ops.aten.empty_strided.default), "PrivateUse1")
