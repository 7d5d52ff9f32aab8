"""Images as a backbone was trained on them."""

import torch

from broadsight.dense import open_stages
from broadsight.dense.stages import Normalise


def test_normalise__by_the_backbones_own_mean_and_deviation():
    stages = open_stages("test_convnext")
    stages.mean, stages.std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    normalise = Normalise(stages)
    image = torch.tensor([1.0, 0.0, 0.5]).view(3, 1, 1).expand(3, 2, 2)
    assert normalise(image)[:, 0, 0].tolist() == [1, -1, 0.5]
    assert torch.equal(normalise(image[None])[0], normalise(image))
    assert normalise.state_dict() == {}
