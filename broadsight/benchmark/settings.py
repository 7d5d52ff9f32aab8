"""What a benchmark is asked to measure, and how often."""

from dataclasses import dataclass
from typing import Any

import torch

from ..deployment.formats import runtimes
from ..errors import unknown
from ..layers.context_broadcast import KINDS
from ..surgery.pooling import POOLS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

RUNTIMES = ("eager", "compile", *runtimes())  # and what has been registered since


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Args:
        batch: Images per call.
        size: Height and width of an image in pixels; a single number is a square.
        threads: Threads of operators, in every runtime; torch's previous number is restored afterwards.
        rounds: Calls of each contender that count.
        warmup: Calls of each contender beforehand that do not.
        runtimes: Of RUNTIMES; every model becomes one contender per runtime. What is exported is folded first.
        train: Time zero_grad + forward + loss + backward in train mode, not a forward pass in eval mode. The loss is
            cross-entropy, or where a pool has groups of tokens MultiTokenLoss("bce") of these.
        device: `cpu` or `cuda` (also `cuda:1`).
        dtype: Key of DTYPES; weights and images are cast to it, no autocast.
        channels_last: Keep weights and images in channels-last memory format.
        fuse: Run `broadsight.fuse` on every model first; inference only.
        seed: Of weights, images and labels.
        pools: Of `swap_pool`; every model becomes one contender per pool.
        broadcasts: Kinds of `add_context_broadcast`, or "none"; every model becomes one contender per kind.
        head_only: Time the pool alone, on random feature maps of the shapes and memory formats that the backbone gives;
            a training step then ends with the maps' gradients. Needs `pools`, or models that come with a pool of ours.
        light: Run `lighten` on every model first; inference only.
        against: Python file with a class PerGroupPool, which has MultiTokenPool's arguments and the released names of
            parameters. Every pool is then compared with that class on the same weights, and must agree with it.
        start_up: With an exported runtime among them: start every contender in a fresh process as well, see
            `start_up.StartUp`.
    """

    batch: int = 8
    size: tuple[int, int] = (224, 224)
    threads: int = 1
    rounds: int = 9
    warmup: int = 2
    runtimes: tuple[str, ...] = ("eager",)
    train: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    fuse: bool = False
    seed: int = 0
    pools: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    head_only: bool = False
    light: bool = False
    against: str | None = None
    start_up: bool = True

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "runtimes", tuple(self.runtimes))
        object.__setattr__(self, "pools", tuple(self.pools))
        object.__setattr__(self, "broadcasts", tuple(self.broadcasts))
        for name, least in {"batch": 1, "threads": 1, "rounds": 1, "warmup": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; expected {least} or more")
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size={size}; expected two positive numbers, height and width in pixels")
        for runtime in self.runtimes:
            _choose("runtime", runtime, ("eager", "compile", *runtimes()))
        self._check_exported()
        if not self.runtimes:
            raise ValueError(f"runtimes is empty; expected some of {', '.join(RUNTIMES)}")
        for pool in self.pools:
            _choose("pool", pool, POOLS)
        for kind in self.broadcasts:
            _choose("broadcast", kind, ("none", *KINDS))
        _choose("dtype", self.dtype, DTYPES)
        kind = _choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device here; use device='cpu'")
        if self.fuse and self.train:
            raise ValueError("fuse=True with train=True; fusing is for inference, drop one of the two")
        if self.train and (self.light or "map-light" in self.pools):
            raise ValueError("a light pool with train=True; its classifiers are trained in the full one: drop one")
        if self.against is not None and not self.head_only:
            raise ValueError(
                "against a file without head_only; only pools are compared so: add head_only (--head-only)"
            )

    @property
    def exported(self) -> tuple[str, ...]:
        """Those of the runtimes that run files."""
        return tuple(name for name in self.runtimes if name in runtimes())

    def _check_exported(self) -> None:
        others = {
            "train": self.train,
            "head_only": self.head_only,
            "against": self.against is not None,
            f"device={self.device!r}": not self.device.startswith("cpu"),
            f"dtype={self.dtype!r}": self.dtype != "float32",
            "channels_last": self.channels_last,
        }
        for what, asked in others.items():
            if asked and self.exported:
                raise ValueError(
                    f"{what} with runtime {self.exported[0]!r}; exported models are timed whole, in inference, on "
                    "the CPU, and come from float32: drop one of the two"
                )


def _choose(what: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        raise unknown(what, value, allowed)
    return value
