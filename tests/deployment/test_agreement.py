from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from broadsight.deployment import Session, compare, rounding_of
from broadsight.deployment.agreement import allowance
from tests.deployment.tiny import described
from tests.refusals import refused


def session_of(change) -> Session:
    return Session(described(2), lambda images: [change(*reference(images))])


def reference(images: np.ndarray) -> list[np.ndarray]:
    return [images.reshape(len(images), -1)[:, :4]]


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(n, 3, 2, 2)).astype(np.float32) for n in (1, 4)]


def test_compare__counts_images_and_finds_the_largest_difference_over_the_largest_output():
    found = compare(session_of(lambda x: x), reference, batches())
    assert (found.images, found.largest, found.relative, found.same_class) == (5, 0.0, 0.0, 1.0) and found.within(1e-9)
    given = [np.full((1, 3, 2, 2), 2.0, np.float32), np.full((2, 3, 2, 2), -8.0, np.float32)]
    found = compare(session_of(lambda x: x + np.float32([0, 0.5, 0, 0])), reference, given)
    assert (found.largest, found.relative) == (0.5, 0.5 / 8)
    assert found.within(0.0625) and not found.within(0.06)


def test_compare__every_output_has_its_own_scale():
    def two(images: np.ndarray, more: float = 0.0) -> list[np.ndarray]:
        return [1000 * np.ones((len(images), 1)), 0.1 * np.ones((len(images), 1)) + more]

    both = Session(described(2, outputs=("a", "b"), task="detect"), lambda images: two(images, 0.05))
    found = compare(both, two, batches())
    assert (found.largest, found.relative, found.same_class) == (pytest.approx(0.05), pytest.approx(0.5), None)


def test_compare__not_a_number_never_passes_other_classes_are_counted_and_shapes_compared():
    assert not compare(session_of(lambda x: x * np.float32("nan")), reference, batches()).within(1e9)
    given = [np.float32([[1, 2, 3, 4], [4, 3, 2, 1]]).repeat(3, 0).reshape(6, 1, 2, 2).repeat(3, 1)]
    assert compare(session_of(lambda x: np.abs(x - [0, 0, 0, 4])), reference, given).same_class == 0.5
    words, fewer = r"shape \(1, 3\) in its runtime, \(1, 4\) in torch", session_of(lambda x: x[:, :3])
    refused(words, compare, fewer, reference, batches(), error=RuntimeError)
    refused("at least one", compare, session_of(lambda x: x), reference, [])


def test_compare__follows_a_choice_among_equals():
    def chosen(images: np.ndarray) -> list[np.ndarray]:
        return [images.reshape(len(images), -1)[:, 4:8]]

    def follow(images: np.ndarray, found: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(found["logits"].shape)
        return chosen(images)

    seen: list[tuple[int, ...]] = []
    other = Session(described(2), chosen)
    assert compare(other, reference, batches()).largest > 0.1
    assert compare(other, reference, batches(), follow).largest == 0 and seen == [(1, 4), (4, 4)]


class Cancels(nn.Module):
    """A small number as the difference of large ones: (B, 1, 1, 1) -> that, and twice the image."""

    def __init__(self, size: float):
        super().__init__()
        self.size = nn.Parameter(torch.tensor(size))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return (images + self.size) - self.size, 2 * images


def test_rounding__is_what_single_precision_loses():
    batches = [np.full((1, 1, 1, 1), 0.3, np.float32), np.full((2, 1, 1, 1), 1.0, np.float32)]
    assert rounding_of(Cancels(0.0), batches) == 0
    lost = abs(float(np.float32(np.float32(0.3) + np.float32(2**20)) - np.float32(2**20)) - float(np.float32(0.3)))
    assert lost > 0.01 and rounding_of(Cancels(2.0**20), batches) == pytest.approx(lost, rel=1e-6)


def test_allowance__of_half_precision_is_at_least_two_steps_of_it():
    assert [allowance(0, one) for one in ("fp32", "bf16", "fp16")] == [0, 2**-6, 2**-9]
    assert allowance(0.02, "bf16") == pytest.approx(0.1) and allowance(0.02) == pytest.approx(0.2)
    images = [np.full((1, 1, 1, 1), 1.01, np.float32)]
    halved = nn.Conv2d(1, 1, 1, bias=False)  # whose one product autocast computes in bfloat16
    nn.init.ones_(halved.weight)
    lost = abs(float(torch.tensor(1.01).bfloat16()) / 1.01 - 1)
    assert [rounding_of(halved, images, one) for one in ("bf16", "fp32")] == [pytest.approx(lost, rel=1e-4), 0]


def test_within__allows_for_what_rounding_does_to_torch_itself():
    found = compare(session_of(lambda x: x + np.float32(0.5)), reference, [np.ones((1, 3, 2, 2), np.float32)])
    assert not found.within(0.1) and not replace(found, rounding=0.04).within(0.1)
    assert replace(found, rounding=0.06).within(0.1)
    usual = replace(found, relative=2e-5, rounding=5e-5)  # torch's own rounding as always
    assert usual.within(2e-5) and not usual.within(1e-5)
    assert not replace(found, relative=float("nan"), rounding=1.0).within(0.1)
