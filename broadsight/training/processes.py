"""The processes of a run: one, or those that `torchrun` or `accelerate launch` started."""

import os
import re
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_restarted = False


def connect(device: str = "auto", precision: str = "fp32", expected: int | None = None) -> Accelerator:
    """The accelerator of this process, after all processes have met, as many as are `expected`."""
    meet(device, expected)
    on_cpu = device_kind(device) == "cpu"
    if precision == "fp16" and on_cpu:
        raise ValueError("precision=fp16 needs a GPU; use precision=bf16 or fp32")
    # Accelerate keeps its state for the whole interpreter; a second run in it may need another
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    return Accelerator(cpu=on_cpu, mixed_precision=precision.replace("fp32", "no"))


def meet(device: str = "auto", expected: int | None = None) -> None:
    """Join the other processes, after a check that as many run as were asked for."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local, wanted = int(os.environ.get("LOCAL_WORLD_SIZE", world)), expected or _launched()
    if wanted and wanted != world:
        command = f"torchrun --standalone --nproc-per-node {wanted} -m broadsight train ..."
        raise ValueError(f"{wanted} processes asked for, {world} running; start them with: {command}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError("device cuda asked for, but torch sees no GPU here; use --device cpu or auto")
    if device != "cpu" and gpus and local > gpus:
        advice = f"start {gpus} processes, or use --device cpu"
        raise ValueError(f"{local} processes on this machine, but {gpus} GPUs; {advice}")
    if world > 1 and not dist.is_initialized():
        _join("gloo" if device_kind(device) == "cpu" else "nccl")


def device_kind(device: str | None = "auto") -> str:
    """Where training would run: on a GPU or another accelerator, or on the CPU."""
    there = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), xpu=torch.xpu.is_available())
    return next((kind for kind, is_there in there.items() if is_there and device != "cpu"), "cpu")


def leave() -> None:
    """Leave the process group that `connect` joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether torchrun restarted the processes after one had failed; known once they have met."""
    return _restarted or int(os.environ.get(RESTARTS, 0)) > 0


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """The sum of every process's values, at every process."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_objects(value: Any) -> list[Any]:
    """Every process's value, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The first process's value, at every process."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def share_buffers(module: torch.nn.Module) -> None:
    """Give every process the first one's buffers, such as BatchNorm's statistics."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def _join(backend: str) -> None:
    """Join the process group under a number that no earlier one has had, and agree on whether any was restarted."""
    # After a restart torchrun may hand out the store of the attempt that failed, with the addresses of dead processes,
    # for which gloo would wait half an hour; it counts restarts only on the node where a process has failed
    global _restarted
    whole, rank, world = next(iter(dist.rendezvous("env://", timeout=timedelta(minutes=10))))
    store = dist.PrefixStore("broadsight", whole)
    if rank:
        me = uuid4().hex
        store.set(f"here/{rank}", me)
        number = int(store.get(f"group/{me}"))  # waits for the first process's answer
    else:
        number = store.add("groups", 1)
    store.add(f"restarts/{number}", int(os.environ.get(RESTARTS, 0)))
    store.add(f"joined/{number}", 1)
    if rank == 0:
        while store.add(f"joined/{number}", 0) < world:
            for other in range(1, world):  # answers to dead ones are never read
                store.set(f"group/{store.get(f'here/{other}').decode()}", str(number))
            time.sleep(0.05)
        store.set(f"complete/{number}", "")
    store.wait([f"complete/{number}"])
    _restarted = store.add(f"restarts/{number}", 0) > 0
    dist.init_process_group(backend, store=dist.PrefixStore(f"group_{number}", whole), rank=rank, world_size=world)


def _launched() -> int | None:
    """The processes that `accelerate launch` was told to start; on CPUs it may silently start only one."""
    if "WORLD_SIZE" in os.environ:
        return None
    try:
        import psutil

        parent = psutil.Process().parent()
        command = " ".join(parent.cmdline()) if parent else ""
    except Exception:  # the check is only a courtesy
        return None
    asked = re.search(r"accelerate.*--num[_-]processes[= ](\d+)", command)
    return int(asked[1]) if asked else None
