"""Inputs that are nearly whole: seeds with a few bytes changed, lost, repeated or taken from another seed."""

from collections.abc import Sequence

from hypothesis import strategies as st

# Numbers that lengths, counts and offsets go wrong at, in both orders of bytes.
EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, (1 << 63) - 1, (1 << 64) - 1)
WORDS = tuple(
    sorted(
        {
            edge.to_bytes(size, order)
            for edge in EDGES
            for size in (1, 2, 4, 8)
            if edge < 1 << 8 * size
            for order in ("little", "big")
        }
    )
)


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after none to six changes."""
    data = draw(st.sampled_from(seeds))
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=6)):
        data = change(draw, data, seeds)
    return data


def _span(draw: st.DrawFn, data: bytes, longest: int) -> tuple[int, int]:
    """Where a part of the input begins and ends."""
    start = draw(st.integers(0, len(data)))
    return start, min(len(data), start + draw(st.integers(0, longest)))


def flip_bit(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    place, bit = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 7))
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def overwrite(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    word = draw(st.sampled_from(WORDS) | st.binary(min_size=1, max_size=8))
    place = draw(st.integers(0, len(data)))
    return data[:place] + word + data[place + len(word) :]


def insert(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    place = draw(st.integers(0, len(data)))
    return data[:place] + draw(st.binary(min_size=1, max_size=16)) + data[place:]


def remove(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data, 64)
    return data[:start] + data[end:]


def cut(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def repeat(draw: st.DrawFn, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data, 256)
    return data[:end] + data[start:end] * draw(st.integers(1, 4)) + data[end:]


def splice(draw: st.DrawFn, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = draw(st.sampled_from(seeds))
    return data[: draw(st.integers(0, len(data)))] + other[draw(st.integers(0, len(other))) :]


CHANGES = (flip_bit, overwrite, insert, remove, cut, repeat, splice)
