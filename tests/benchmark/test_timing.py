"""Rounds and their samples."""

import pytest

from broadsight.benchmark.timing import Summary, interleave, median_interval, paired_ratio, summarize


def test_summaries():
    assert summarize([10, 1, 4, 3, 2]) == Summary(median=3, minimum=1, spread=pytest.approx((4 - 2) / 3))
    assert summarize([5.0]) == Summary(5.0, 5.0, 0.0)
    # Of 20 values the sixth and the fifteenth, as tables of the sign test have it; few values say little.
    assert median_interval(range(20, 0, -1)) == (6, 15)
    assert median_interval(range(1, 101)) == (40, 61)
    assert median_interval(range(1, 6)) == (1, 5)
    assert median_interval([7.0]) == (7.0, 7.0)
    assert median_interval(range(1, 21), confidence=0.5) == (8, 13)
    # the machine was ten times slower in the second round; a ratio of medians would say 3 / 3 = 1
    assert paired_ratio([2, 20, 3], [1, 10, 3]) == Summary(median=2, minimum=1, spread=0.25)


def test_interleave__every_round_starts_one_further():
    order = []
    samples = interleave("abc", lambda who, round_: order.append(f"{who}{round_}") or order[-1], rounds=4)
    assert " ".join(order) == "a0 b0 c0 b1 c1 a1 c2 a2 b2 a3 b3 c3"
    assert samples == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"], ["c0", "c1", "c2", "c3"]]

    def timed(who, round_):
        if (who, round_) == ("a", 2):
            raise KeyboardInterrupt
        return f"{who}{round_}"

    assert interleave("ab", timed, rounds=5) == [["a0", "a1"], ["b0", "b1"]]
    with pytest.raises(KeyboardInterrupt):  # before any round is complete there is nothing to keep
        interleave("ba", lambda who, round_: timed(who, round_ + 2), rounds=5)
