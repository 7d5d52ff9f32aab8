"""Seeds for each sample and each update by its place in the run, which makes resuming exact.

Nothing depends on the number of workers, on where a run was interrupted, or on other random draws.
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
    """Seed Python's and numpy's generator and torch's on the CPU, from which transforms draw."""
    seed = mixed(*places)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_everything(*places: int) -> None:
    """Seed Python's and numpy's generator and torch's on every device."""
    seed_transforms(*places)
    torch.manual_seed(mixed(*places))
