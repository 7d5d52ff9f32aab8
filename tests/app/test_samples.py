"""Built-in samples: one of every class."""

import numpy as np

from broadsight.app import samples as module
from broadsight.data.scenes import CLASSES, draw_scene
from tests.training.small_runs import refusal


def test_samples__one_of_every_class_each_with_its_name(monkeypatch):
    monkeypatch.setattr(module, "SIZE", 32)
    found = module.samples.__wrapped__()
    assert [name for name, _ in found] == list(CLASSES)
    for index in range(len(CLASSES)):
        scene = draw_scene(index, size=32, split="test")
        assert np.array_equal(np.asarray(found[scene.label][1]), scene.image)


def test_sample__only_those_there_are(monkeypatch):
    monkeypatch.setattr(module, "samples", lambda: (("a", "image"),))
    assert module.sample(0) == "image"
    for index in (1, -1, "0", None, [0, 1], 0.5):
        assert "no such sample" in refusal(lambda index=index: module.sample(index))
