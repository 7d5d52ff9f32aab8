"""What a benchmark is asked to measure, and how often."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

import torch

from ..dense import HEADS
from ..dense.stages import NECKS
from ..deployment.formats import need, runtimes
from ..errors import check_choice
from ..inspection.precision import chosen
from ..layers.context_broadcast import KINDS
from ..options import Precision
from ..surgery.pooling import POOLS

OLDER = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # what older reports call their one "dtype"
RUNTIMES = ("eager", "compile", *runtimes())  # and what has been registered since


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often: what a Request of `bench` asks for; its help says what each is."""

    batch: int = 8
    size: tuple[int, int] = (224, 224)  # a single number is a square
    threads: int = 1
    rounds: int = 9
    warmup: int = 2
    runtimes: tuple[str, ...] = ("eager",)  # every model becomes one candidate per runtime; what is exported is folded
    train: bool = False  # a whole step in train mode, with cross-entropy, or of groups of tokens MultiTokenLoss("bce")
    device: str = "cpu"  # or `cuda`, `cuda:1`
    # Every runtime has a candidate in each of those that it has; torch casts weights and images, there is no autocast.
    precisions: tuple[str, ...] = ("fp32",)
    channels_last: bool = False
    fuse: bool = False
    seed: int = 0  # of weights, images and labels
    pools: tuple[str, ...] = ()  # every model becomes one candidate per pool,
    broadcasts: tuple[str, ...] = ()  # and per kind of `add_context_broadcast`, or "none"
    head: str | None = None  # then every model is the backbone of this dense model,
    necks: tuple[str, ...] = ()  # with each of these necks; "fpn" if there are none
    model_args: Mapping[str, Any] = field(default_factory=dict)  # each goes to the models,
    pool_args: Mapping[str, Any] = field(default_factory=dict)  # pools
    broadcast_args: Mapping[str, Any] = field(default_factory=dict)
    head_args: Mapping[str, Any] = field(default_factory=dict)
    neck_args: Mapping[str, Any] = field(default_factory=dict)  # or necks that have it, which is "tokens" alone
    head_only: bool = False  # the pool alone, on random maps like the backbone's; a step ends with their gradients
    light: bool = False
    # Python file with a class PerGroupPool, which has MultiTokenPool's arguments and the released names of parameters;
    # every pool must agree with it.
    against: str | None = None
    start_up: bool = True  # with an exported runtime: start every candidate in a fresh process as well

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        object.__setattr__(self, "size", size)
        for name in ("runtimes", "pools", "broadcasts", "necks", "precisions"):  # lists, as JSON has them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size={size}; expected two positive numbers, height and width in pixels")
        for runtime in self.runtimes:
            check_choice("runtime", runtime, ("eager", "compile", *runtimes()))
        needs = {"train": self.train, "head_only": self.head_only, "against": self.against is not None}
        needs |= {f"device={self.device!r}": not self.device.startswith("cpu")}
        needs["channels_last"] = self.channels_last
        if self.exported and (asked := [what for what, asked in needs.items() if asked]):
            whole = "exported models are timed whole, in inference, on the CPU"
            raise ValueError(f"{asked[0]} with runtime {self.exported[0]!r}; {whole}: drop one of the two")
        if not self.runtimes:
            raise ValueError(f"runtimes is empty; expected some of {', '.join(RUNTIMES)}")
        for pool in self.pools:
            check_choice("pool", pool, POOLS)
        for kind in self.broadcasts:
            check_choice("broadcast", kind, ("none", *KINDS))
        for neck in self.necks:
            check_choice("neck", neck, NECKS)
        for precision in self.precisions:
            check_choice("precision", precision, get_args(Precision))
        if self.head is not None:
            check_choice("head", self.head, HEADS)
            if others := [one for one in (*self.runtimes, *self.precisions) if one not in ("eager", "fp32")]:
                how = "dense models are timed eagerly, in fp32, with the decoding of what they find"
                raise ValueError(f"{others[0]} with head {self.head!r}; {how}: drop one of the two")
        check_choice("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device here; use device='cpu'")
        if self.fuse and self.train:
            raise ValueError("fuse=True with train=True; fusing is for inference, drop one of the two")
        if self.train and (self.light or "map-light" in self.pools):
            raise ValueError("a light pool with train=True; its classifiers are trained in the full one: drop one")
        if self.against is not None and not self.head_only:
            hint = "only pools are compared so: add head_only (--head-only)"
            raise ValueError(f"against a file without head_only; {hint}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Settings":
        """What JSON has of settings, of earlier versions as well."""
        data = dict(data)
        if "dtype" in data:
            data["precisions"] = [OLDER[data.pop("dtype")]]
        return cls(**data)

    def lineup(self) -> list[tuple[str, str]]:
        """Runtimes, each in those of the precisions that it has; a ValueError where one of either has no other."""
        found: dict[tuple[str, str], str | ValueError] = {}
        for runtime, asked in product(self.runtimes, self.precisions):
            name, int8 = runtimes().get(runtime, ("", False))
            form = need(name, int8) if name else None
            try:
                found[runtime, asked] = form.precision(asked, int8) if form else chosen(asked, self.device)
            except ValueError as error:
                found[runtime, asked] = error
        for one in (*self.runtimes, *self.precisions):
            mine = [cell for names, cell in found.items() if one in names]
            if all(isinstance(cell, ValueError) for cell in mine):
                raise mine[0]  # ty: ignore[invalid-raise]
        each = {name: dict.fromkeys(found[name, asked] for asked in self.precisions) for name in self.runtimes}
        return [(name, one) for name in self.runtimes for one in each[name] if isinstance(one, str)]

    @property
    def exported(self) -> tuple[str, ...]:
        """Those of the runtimes that run files."""
        return tuple(name for name in self.runtimes if name in runtimes())
