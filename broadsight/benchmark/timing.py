"""Interleaved rounds of timing, and statistics of their samples."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Summary:
    """Median, minimum and spread of some samples; spread is the inter-quartile range divided by the median."""

    median: float
    minimum: float
    spread: float


def interleave(candidates: Sequence[T], timed: Callable[[T, int], S], rounds: int) -> list[list[S]]:
    """Samples by candidate and round; each round starts one further. An interrupt ends it early, after the first."""
    samples: list[list[S]] = [[] for _ in candidates]
    try:
        for round_, i in product(range(rounds), range(len(candidates))):
            place = (round_ + i) % len(candidates)
            samples[place].append(timed(candidates[place], round_))
    except KeyboardInterrupt:
        complete = min(map(len, samples))
        if not complete:
            raise
        samples = [mine[:complete] for mine in samples]
    return samples


def summarize(values: Sequence[float]) -> Summary:
    median = statistics.median(values)
    if len(values) < 2:
        return Summary(median, median, 0.0)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, min(values), (third - first) / median if median else 0.0)


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Summary:
    """Summary of `values[r] / base[r]` over the rounds r: a ratio of medians would mix different moments."""
    return summarize([value / max(other, 1e-9) for value, other in zip(values, base, strict=True)])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the median by the sign test; of few values from the smallest to the largest."""
    ordered, count = sorted(values), len(values)
    below, cut = 0.5**count, 0  # the chance that not more than `cut` values are below the median
    while below + math.comb(count, cut + 1) * 0.5**count <= (1 - confidence) / 2:
        cut += 1
        below += math.comb(count, cut) * 0.5**count
    return ordered[cut], ordered[count - 1 - cut]
