import numpy as np
import pytest

from broadsight.deployment import Session
from tests.deployment.tiny import described


def sums(images: np.ndarray) -> list[np.ndarray]:
    return [images.sum((1, 2, 3), keepdims=False)[:, None]]


def test_call__names_the_outputs_and_takes_any_layout_and_dtype():
    session = Session(described(4), sums)
    images = np.asfortranarray(np.arange(2 * 48, dtype=np.float64).reshape(2, 3, 4, 4))
    found = session(images)
    assert found.keys() == {"logits"}
    assert found["logits"].tolist() == [[1128.0], [3432.0]]


def test_call__one_by_one_where_the_artefact_takes_one():
    seen = []

    def run(images: np.ndarray) -> list[np.ndarray]:
        seen.append(images.shape)
        return sums(images)

    images = np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32)
    found = Session(described(4, any_batch=False), run)(images)["logits"]
    assert seen == [(1, 3, 4, 4)] * 3
    np.testing.assert_array_equal(found, sums(images)[0])


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 1, 4, 4), (1, 3, 5, 4), (0, 3, 4, 4)])
def test_call__refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"exported for \(B, 3, H, W\) with 4 x 4"):
        Session(described(4), sums)(np.zeros(shape, np.float32))


def test_call__any_size():
    found = Session(described(4, any_size=True), sums)(np.ones((1, 3, 5, 7), np.float32))
    assert found["logits"].tolist() == [[105.0]]
