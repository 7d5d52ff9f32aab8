"""Names of layers, patterns of them, and how far one moves the logits."""

import numpy as np
import pytest

from broadsight.deployment.int8.layers import matching, moved, unique_names


def test_unique_names__a_module_of_its_own_needs_no_more():
    found = [("stem", "conv2d"), ("attn", "linear"), ("attn", "matmul"), ("attn", "matmul"), ("", "node_7")]
    assert unique_names(found) == ["stem", "attn.linear", "attn.matmul", "attn.matmul_1", "node_7"]
    assert unique_names([("fc", "linear"), ("fc", "linear")]) == ["fc.linear", "fc.linear_1"]


def test_matching__patterns_and_whole_modules_in_the_order_of_the_names():
    names = ["stages.0.conv", "stages.0.mlp.fc1", "stages.1.conv", "head.fc"]
    assert matching(["head", "stages.0.*"], names) == ["stages.0.conv", "stages.0.mlp.fc1", "head.fc"]
    assert matching(["*.conv"], names) == ["stages.0.conv", "stages.1.conv"]
    assert matching([], names) == []


def test_matching__a_pattern_without_a_layer_names_some_that_exist():
    with pytest.raises(ValueError, match=r"--keep-float 'layer\*' matches no layer; there are 2, such as stem, fc"):
        matching(["stem", "layer*"], ["stem", "fc"])


def test_moved__by_hand():
    expected = np.array([[3.0, 1.0], [0.0, 4.0]])  # centred: 1 -1, -2 2
    assert moved(expected + 7, expected) == 0
    assert moved(np.array([[3.0, 1.0], [1.0, 3.0]]), expected) == pytest.approx((2 / 10) ** 0.5)
    assert moved(np.full((2, 2), np.nan), expected) == float("inf")
