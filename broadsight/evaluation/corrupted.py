"""A source as a camera in bad weather would give it."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from ..data.loading import Transforms
from ..data.seeds import mixed
from ..data.sources import Source
from ..data.view import View


class Corrupted(View):
    """Images as the model sees them, resized and cropped, and then corrupted, as those of ImageNet-C were.

    What becomes of an image depends on its index and the seed alone, so that any order and any process gives the same
    pixels. No further geometry must follow: `as_bytes` is the transform to load these with.

    Args:
        transforms: The evaluation's.
        name, severity: Of the corruption.
    """

    def __init__(self, source: Source, transforms: Transforms, name: str, severity: int, seed: int = 0):
        check_corruptions((name,), (severity,))
        super().__init__(source)
        self.geometry = transforms.build(False)
        self.corruption, self.severity, self.seed = name, severity, seed

    def open(self, index: int) -> Image.Image:
        pixels = torch.as_tensor(self.geometry(super().open(index))).permute(1, 2, 0).numpy()  # H W C
        found = corrupt(pixels, self.corruption, self.severity, seed=mixed(self.seed, index))
        return Image.fromarray(found[..., 0] if found.shape[2] == 1 else found)


def as_bytes(image: Image.Image) -> Tensor:
    """(C, H, W) of bytes."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def check_corruptions(names: Sequence[str], severities: Sequence[int]) -> None:
    for name in names:
        if name not in CORRUPTIONS:
            raise ValueError(f"unknown corruption {name!r}; corruptions are {', '.join(CORRUPTIONS)}")
    for severity in severities:
        if severity not in SEVERITIES:
            raise ValueError(f"severity {severity}; expected some of {', '.join(map(str, SEVERITIES))}")
