"""A classifier of colours whose weights are written down, with a layer that int8 destroys if asked for."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.deployment import Description, capture
from broadsight.deployment.formats import of_file
from tests.deployment.tiny import described

CLASSES = ("red", "green", "blue")
WIDTH = 32
LAYERS = ("conv1", "conv2", "dw", "conv3", "conv4", "fc")  # of Colours, that int8 is good for


class Colours(nn.Module):
    """(B, 3, H, W) -> (B, 3): which colour there is most of.

    Channels 1 to 3 carry red, green and blue; channel 0 carries `outlier`, which nobody reads. If that is huge, int8
    has no steps left for the others wherever it passes: behind conv1, before conv2. The others carry noise.
    """

    num_classes = 3

    def __init__(self, outlier: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.dw = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.conv3 = nn.Conv2d(WIDTH, WIDTH, 1)
        self.conv4 = nn.Conv2d(WIDTH, WIDTH, 1)
        self.lone = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.fc = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for module in (self.stem, self.conv1, self.conv2, self.dw, self.conv3, self.conv4, self.lone):
                module.weight.mul_(0.1)
                module.bias.zero_()
                middle = module.kernel_size[0] // 2
                module.weight[1:4] = 0
                for place in (1, 2, 3):
                    own = 0 if module.groups > 1 else place - (module is self.stem)
                    module.weight[place, own, middle, middle] = 1
            self.stem.bias[1:4] = 3  # above zero whatever the image
            self.conv1.bias[0] = outlier
            self.conv2.weight[:, 0] = 0
            self.fc.weight.mul_(0.01)
            self.fc.weight[:, 1:4] = torch.eye(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.conv2(self.conv1(x).relu()).relu()
        x = self.conv3(self.dw(x).relu()).relu()
        x = F.gelu(self.conv4(x)) + x
        return self.fc(self.lone(x).mean((2, 3)))


class Odd(nn.Module):
    """Weights that lie behind a slice, a stack of matrices, two activations, and a mask of minus infinity."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Parameter(torch.randn(128, 3 * 64) / 14)
        self.stack = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(64, 3)
        self.register_buffer("mask", torch.where(torch.eye(16) > 0, float("-inf"), 0.0))

    def forward(self, x):
        x = F.unfold(x, 8, stride=8).mT  # B 16 192
        x = F.linear(x, self.both[:64]).unflatten(2, (4, 16)).transpose(1, 2)  # B 4 16 16
        x = x @ self.stack
        masked = self.mix(x + self.mask).clamp(-1, 1)
        x = (x @ x.mT).softmax(-1) @ x + masked.nan_to_num(0.0)
        return self.head(x.transpose(1, 2).flatten(2).mean(1))


def colours_described(side: int = 32, **changes) -> Description:
    return described(side, classes=CLASSES, title="colours", **changes)


def noise(count: int = 12, side: int = 32) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, 3, side, side)).astype(np.float32)


def written(model: nn.Module, path: Path, **changes) -> Path:
    """A float file of the format that the path's ending says, with the names of its layers."""
    said = colours_described(**changes)
    program = capture(model.eval(), said.shape, any_batch=said.image["any_batch"])
    of_file(path).write(program, said, path)
    if path.suffix == ".xml":
        from broadsight.deployment.int8.openvino import name_layers

        name_layers(path, program)
    return path
