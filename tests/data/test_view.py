"""Some images of a source, under other numbers."""

import numpy as np

from broadsight.data.scenes import Scenes
from broadsight.data.view import View, labels_of, sample


def test_view__rows_and_other_numbers_or_some_drawn_in_order():
    scenes = Scenes(20, size=16)
    others = (*reversed(scenes.classes), "more")
    view = View(scenes, np.array([7, 3]), others, np.arange(len(scenes.classes))[::-1])
    assert len(view) == 2 and view.classes == others
    assert [view.name(0), view.name(1)] == [scenes.name(7), scenes.name(3)]
    assert others[view.label(1)] == scenes.classes[scenes.label(3)]
    assert view.open(0).tobytes() == scenes.open(7).tobytes()
    view = View(scenes)
    assert labels_of(view).tolist() == labels_of(scenes).tolist() == [scenes.label(row) for row in range(20)]
    some = sample(scenes, 8, seed=1)
    assert isinstance(some, View) and some.rows.tolist() == sorted(set(some.rows.tolist())) and len(some) == 8
    assert some.rows.tolist() == sample(scenes, 8, seed=1).rows.tolist() != sample(scenes, 8, seed=2).rows.tolist()
    assert sample(scenes, 20) is sample(scenes, None) is scenes
