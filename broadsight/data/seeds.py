"""Seeds for each sample and each update by its place in the run alone, which makes resuming exact."""

import random

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
    """Seed Python's and numpy's generator and torch's on the CPU, from which transforms draw."""
    seed = mixed(*places)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_everything(*places: int) -> None:
    """Seed Python's and numpy's generator and torch's on every device."""
    seed_transforms(*places)
    torch.manual_seed(mixed(*places))
