"""The seeds of fuzzing, and a few mutants of each: what once did harm does none, and is refused in a line."""

import random
from collections.abc import Callable

import pytest

from fuzz import images, tars


def mutants(data: bytes, count: int) -> list[bytes]:
    """The same with some bytes changed, cut out or cut off, the same ones every time."""
    chance, found = random.Random(len(data)), []
    for _ in range(count if data else 0):
        other = bytearray(data)
        for _ in range(chance.choice((1, 3, 9))):
            at = chance.randrange(min(len(other), chance.choice((100, 1000, 10**6))))
            other[at : at + chance.choice((0, 1, 1, 4))] = bytes([chance.randrange(256)])
        found.append(bytes(other[: len(other) if chance.random() < 0.8 else chance.randrange(len(other))]))
    return found


@pytest.mark.parametrize(
    "one, seeds, count", [(images.one, images.seeds, 3), (tars.one, tars.seeds, 1)], ids=["images", "tars"]
)
def test_seeds_and_mutants(one: Callable[[bytes], None], seeds: Callable[[], list[bytes]], count: int):
    for seed in seeds():
        one(seed)
        for mutant in mutants(seed, count if len(seed) < 50_000 else 0):
            one(mutant)
