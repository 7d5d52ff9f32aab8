"""Removal curves of classifiers that find one bright pixel: when it goes is known."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from broadsight.analysis import plot_salient_removal, salient_removal
from broadsight.evaluation.robustness import Choices, run_suite
from tests.evaluation.test_robustness import bright, finds_bright
from tests.training.small_runs import refusal


def brightness(images, batch):
    return images.sum(1)


def test_by_hand():
    # The bright pixel of 16 is the first to go: at 0.1, round(1.6) = 2 are gone. The other way it is the last.
    found = salient_removal(finds_bright(4), bright(4, (0, 0), (2, 3)), saliency=brightness, fractions=(0.1, 0.5, 1.0))
    assert found.fractions == (0.0, 0.1, 0.5, 1.0) and found.images == 2 and found.saliency == "brightness"
    assert found.top1["salient first"] == (100, 0, 0, 0)
    assert found.top1["least salient first"] == (100, 100, 100, 0)
    assert found.areas["salient first"] == pytest.approx(100 * 0.05)  # a triangle 0.1 wide
    assert found.areas["least salient first"] == pytest.approx(100 * 0.75)
    assert found.gaps["least salient first"] == pytest.approx(70)
    assert found.gaps["random"] == pytest.approx(found.areas["random"] - 5)
    record = json.loads(json.dumps(found.record()))
    assert record["saliency"] == "brightness" and record["errors"].keys() == record["top1"].keys()
    assert record["gaps"] == found.gaps and record["top1"]["salient first"] == [100, 0, 0, 0]
    source = bright(4, (0, 0), (1, 1), (2, 2), (3, 3))
    source.labels[1:] = 0  # one of four is right
    found = salient_removal(finds_bright(4), source, saliency=brightness, fractions=(1.0,))
    assert found.top1["random"] == (25, 75)
    assert found.errors("random") == pytest.approx((100 * (0.25 * 0.75 / 4) ** 0.5,) * 2)


def test_it_is_the_suite_of_eval():
    classifier, source = finds_bright(6), bright(6, *((i, i) for i in range(6)))
    choices = Choices(fractions=(0.2, 0.6))
    suite = run_suite("salient", classifier, source, choices=choices, saliency=brightness, seed=3)
    counts: list[int] = []
    options = dict(fractions=(0.2, 0.6), seed=3, batch_size=4, seen=counts.append)
    found = salient_removal(classifier, source, saliency=brightness, **options)
    for order, values in found.top1.items():
        assert list(zip(found.fractions, values, strict=True)) == suite.curve(order)
        assert found.areas[order] == suite.summary[f"area, {order}"]
    assert counts[-1] == 6 and counts == sorted(counts)
    # an image that cannot be read is told of
    source = bright(4, (0, 0), (2, 3), (1, 1))
    source.broken = (1,)
    found = salient_removal(finds_bright(4), source, saliency=brightness, fractions=(0.5,))
    assert found.images == 2 and list(found.skipped) == ["1.png"]
    with pytest.raises(RuntimeError, match="cut short"):
        salient_removal(finds_bright(4), source, saliency=brightness, strict=True)


def test_own_saliency_by_name_and_refusals(tmp_path):
    (tmp_path / "mine.py").write_text("def bright(images, batch):\n    return images.sum(1)\n")
    name = f"{tmp_path / 'mine.py'}:bright"
    found = salient_removal(finds_bright(4), bright(4, (0, 0)), saliency=name, fractions=(0.1,))
    assert found.top1["salient first"] == (100, 0) and found.saliency == "bright"
    classifier, source = finds_bright(4), bright(4, (0, 0))
    assert "open_classifier" in refusal(lambda: salient_removal(nn.Identity(), source))
    assert "did you mean 'gradcam'" in refusal(lambda: salient_removal(classifier, source, saliency="gradcm"))
    assert "needs scenes" in refusal(lambda: salient_removal(classifier, source, saliency="scenes"))
    assert "between 0 and 1" in refusal(lambda: salient_removal(classifier, source, fractions=(1.5,)))
    assert "dino" in refusal(lambda: salient_removal(classifier, source, saliency=brightness, dino_checkpoint="x"))
    assert "(B, H, W)" in refusal(lambda: salient_removal(classifier, source, saliency=lambda x, b: torch.zeros(3)))
    assert "no images" in refusal(lambda: salient_removal(classifier, bright(4), saliency=brightness))


def test_plot():
    found = salient_removal(finds_bright(4), bright(4, (0, 0), (2, 3)), saliency=brightness, fractions=(0.1, 0.5))
    (panel,) = plot_salient_removal({"one": found, "two": found}).axes
    assert len(panel.lines) == 6
    assert np.allclose(panel.lines[0].get_xydata(), [[0, 100], [10, 0], [50, 0]])
