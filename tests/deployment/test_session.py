import numpy as np
import pytest

from broadsight.deployment import Description, Session
from tests.deployment.tiny import described, noise
from tests.refusals import refused


def sums(images: np.ndarray) -> list[np.ndarray]:
    return [images.sum((1, 2, 3), keepdims=False)[:, None]]


def test_call__names_the_outputs_and_takes_any_layout_dtype_and_open_size_or_one_by_one():
    images = np.asfortranarray(np.arange(2 * 48, dtype=np.float64).reshape(2, 3, 4, 4))
    found = Session(described(4), sums)(images)
    assert found.keys() == {"logits"} and found["logits"].tolist() == [[1128.0], [3432.0]]
    found = Session(described(4, any_size=True), sums)(np.ones((1, 3, 5, 7), np.float32))
    assert found["logits"].tolist() == [[105.0]]

    def run(images: np.ndarray) -> list[np.ndarray]:
        seen.append(images.shape)
        return sums(images)

    seen, images = [], noise(3, 3, 4, 4)
    found = Session(described(4, any_batch=False), run)(images)["logits"]
    assert seen == [(1, 3, 4, 4)] * 3
    np.testing.assert_array_equal(found, sums(images)[0])


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 1, 4, 4), (1, 3, 5, 4), (0, 3, 4, 4)])
def test_call__refuses_other_shapes(shape):
    refused(r"exported for \(B, 3, H, W\) with 4 x 4", Session(described(4), sums), np.zeros(shape, np.float32))


def test_json__gives_the_same_back_and_refuses_what_is_not_ours_or_a_later_version():
    for changes in ({}, {"classes": None}, {"quantised": {"kept": ["a"]}, "outputs": ("a", "b")}):
        one = described(48, channels=1, **changes)
        assert Description.from_json(one.to_json()) == one and one.shape == (1, 48, 48)
    for text in ("", "[]", "{}", '{"version": 1}', '{"version": 1, "task": "classify", "outputs": 3}'):
        refused("description is damaged", Description.from_json, text)
    refused("version 99", Description.from_json, described().to_json().replace('"version": 1', '"version": 99'))
