"""Random numbers that depend on the place in a run, not on how it was reached: what makes resuming exact.

Every sample and every update draws from generators seeded by its place in the run. So nothing depends on how many
workers prepare the data, where a run was interrupted, or what else has drawn numbers before.
"""

import random
from collections.abc import Callable

import numpy as np
import torch

# How seeds follow from places. A run keeps the number: continued with other seeds it would become another run.
# 1: a mixer of our own. 2: numpy's SeedSequence.
SCHEME = 2


def mixed(*places: int) -> int:
    """A seed of 63 bits from one or more whole numbers; neighbouring places give unrelated seeds."""
    seed, *spawned = (place % 2**64 for place in places)
    # As further entropy, zeros at the end of the places would not count; as a spawn key they do
    return int(np.random.SeedSequence(seed, spawn_key=tuple(spawned)).generate_state(1, np.uint64)[0]) >> 1


def seed_transforms(*places: int) -> None:
    """Seed what transforms on the CPU draw from: Python's, numpy's and torch's generator."""
    _seed(torch.default_generator.manual_seed, places)


def seed_everything(*places: int) -> None:
    """Seed Python's and numpy's generator and torch's on every device."""
    _seed(torch.manual_seed, places)


def _seed(torchs: Callable[[int], object], places: tuple[int, ...]) -> None:
    seed = mixed(*places)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torchs(seed)
