"""Figures by name, with their units."""

import pytest

from broadsight.visual.metrics import figure
from broadsight.visual.words import NOTHING

SHOWN = [("top1", 34.46, "34.5 %"), ("top1", None, NOTHING), ("latency_ms", 12.0, "12.0 ms"), ("macs", 2.1e8, "210 M")]
SHOWN += [("loss", 1.9, "1.90 nats"), ("unheard_of", 0.5, "0.500"), ("unheard_of", "a & b", "a & b")]


@pytest.mark.parametrize(("key", "value", "shown"), SHOWN)
def test_figure(key, value, shown):
    assert figure(key, value) == (shown if value == "a & b" else shown.replace(" ", "\u00a0"))
