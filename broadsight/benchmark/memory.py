"""Costs of a call beside time: peak memory, what is saved for the backward pass, kernel launches."""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .machine import synchronize

FREE_OPERATIONS = {"_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"}
FREE_OPERATIONS |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def peak_memory(call: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes that torch's allocator holds at the worst moment of a call beyond those before it, which repeat exactly."""
    if torch.device(device).type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    given = "KINETO_LOG_LEVEL" in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes to stderr, through the progress bar
    with tempfile.TemporaryDirectory() as folder:
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
                call()
            trace = Path(folder) / "trace.json"
            log.export_chrome_trace(str(trace))
        finally:
            if not given:
                del os.environ["KINETO_LOG_LEVEL"]
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    live: dict[int, int] = {}  # address -> bytes; a block that was there before the call may be freed, but is not ours
    now = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            now += size
        else:
            now -= live.pop(address, 0)
        peak = max(peak, now)
    return peak


def saved_for_backward(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of all storages that a forward pass keeps for its backward pass, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storages stops their addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def kernel_launches(call: Callable[[], Any]) -> int:
    """Count the operations of a call that compute or copy, about one kernel each on a GPU; views are free."""

    class Count(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not func.is_view and func._schema.name.removeprefix("aten::") not in FREE_OPERATIONS
            return func(*args, **(kwargs or {}))

    with Count() as counted:
        call()
    return counted.launches
