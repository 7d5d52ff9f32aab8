"""Which images validate: every class that can, none of it lost in training, the same on every machine."""

from itertools import product

import numpy as np

from broadsight.data.stratify import missed, stratified


def names(count: int) -> list[str]:
    return [f"{number:03d}.png" for number in range(count)]


def sides(classes, held):
    """Classes of the images to train on, and of those held out."""
    return tuple(
        {one for labels, out in zip(classes, held, strict=True) if out == part for one in labels} for part in (0, 1)
    )


def test_stratified__classes_in_two_images_are_on_both_sides():
    classes = [[0]] * 38 + [[0, 1]] * 2
    for seed in range(20):
        held = stratified(names(40), classes, 0.1, seed)
        assert sides(classes, held) == ({0, 1}, {0, 1}) and held.sum() == 4
    # many rare ones hold out more than the fraction
    classes = [[number // 2] for number in range(40)]  # 20 classes, two images each
    held = stratified(names(40), classes, 0.1, 0)
    assert sides(classes, held) == (set(range(20)), set(range(20))) and held.sum() == 20


def test_stratified__fractions_of_several_classes_at_once():
    random = np.random.default_rng(0)
    classes = [np.flatnonzero(random.random(6) < [0.9, 0.5, 0.3, 0.1, 0.05, 0.02]).tolist() for _ in range(400)]
    held = stratified(names(400), classes, 0.2, 3)
    assert 70 <= held.sum() <= 90
    for one in range(6):
        there = np.array([one in labels for labels in classes])
        assert abs((there & held).sum() / there.sum() - 0.2) < 0.1, one


def test_stratified__the_last_image_of_a_class_stays_in_training():
    classes = [[0, 1], [0], [0], [0]]
    held = stratified(names(4), classes, 0.9, 0)
    assert held.tolist()[0] is False and held.any() and missed(classes, held) == ([1], [])
    triangle = [[0, 1], [0, 2], [1, 2]]  # holding out one image loses none, but leaves a class in training alone
    held = stratified(names(3), triangle, 0.5, 0)
    single, others = missed(triangle, held)
    assert held.sum() == 1 and single == [] and len(others) == 1
    assert not stratified(names(2), [[0], [1]], 0.5, 0).any()  # nothing can be spared


def test_stratified__tries_other_orders_before_it_gives_a_class_up():
    """All of what a search through every way finds, for whatever turns come first."""
    classes = [[0, 1], [0, 2], [1, 3], [2, 3], [3], [2]]

    def covered(held):
        train, val = sides(classes, held)
        return len(val) if train == {0, 1, 2, 3} else -1

    most = max(covered(np.array(way)) for way in product([0, 1], repeat=6))
    assert most == 4
    for seed in range(30):
        assert covered(stratified(names(6), classes, 0.1, seed)) == most, seed


def test_stratified__by_names_and_seed_alone():
    classes = [[number % 3, 3 + number % 5] for number in range(60)]
    held = stratified(names(60), classes, 0.2, 7)
    back = stratified(names(60)[::-1], classes[::-1], 0.2, 7)
    assert held.tolist() == back.tolist()[::-1]
    assert held.tolist() != stratified(names(60), classes, 0.2, 8).tolist()


def test_stratified__counts_images_that_show_nothing_and_sizes():
    assert [stratified(names(10), [[]] * 10, fraction, 0).sum() for fraction in (0.01, 0.3, 0.99)] == [1, 3, 9]
    sizes = np.array([10.0] + [1.0] * 10)
    for seed in range(10):
        held = stratified(names(11), [[0]] * 11, 0.5, seed, sizes)
        assert 10 <= sizes[held].sum() <= 15  # five of the eleven may have the large one among them
