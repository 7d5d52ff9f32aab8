"""Random numbers that depend on where a run is, not on how it got there: what makes resuming exact.

Every sample and every update draws from generators seeded by its place in the run. So nothing depends on how many
workers prepare the data, where a run was interrupted, or what else has drawn numbers before.
"""

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mixed(*places: int) -> int:
    """A seed of 63 bits from a few whole numbers; neighbouring places give unrelated seeds (SplitMix64)."""
    state = 0x9E3779B97F4A7C15
    for place in places:
        state = (state + place * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_transforms(*places: int) -> None:
    """Seed what transforms on the CPU draw from: Python's, numpy's and torch's generator."""
    seed = mixed(*places)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_everything(*places: int) -> None:
    """Seed Python's and numpy's generator and torch's on every device."""
    seed = mixed(*places)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
