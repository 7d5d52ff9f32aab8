"""Crops of objects with keypoints, the input of a top-down pose model."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from .pose_geometry import apply_affine, crop_affine, encode, invert_affine
from .transforms import GROUND


class PoseCrops(Dataset):
    """A crop for each object that has a labelled keypoint, with heat maps of its keypoints.

    Items are bytes (C, H, W) and a dict of heatmaps and weights as of `encode`, and meta: `image` (index in the data),
    `place` (among its objects), `image_id`, `label`, `box` (4,) and `area` in the image, `score` of the box, and
    `matrix` (2, 3) from crop to image. In training, torch's global generator scales, turns and mirrors crops.

    Args:
        dataset: Images with boxes and keypoints. All targets are read once.
        pairs, hflip: Keypoints that change places when a crop is mirrored, and the probability of that.
        rotation: Standard deviation of the angle in degrees of the crops that are turned; at most twice that.
        scale: Standard deviation of the factor on the crop's region, and the most that it differs from 1.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        training: bool,
        input_size: tuple[int, int] = (256, 192),
        pairs: Sequence[tuple[int, int]] = (),
        rotation: float = 40.0,
        scale: float = 0.3,
        hflip: float = 0.5,
        sigma: float = 2.0,
    ):
        self.dataset, self.training, self.input_size = dataset, training, input_size
        self.rotation, self.scale, self.hflip, self.sigma = rotation, scale, hflip, sigma
        self.keypoint_names = tuple(getattr(dataset, "keypoint_names", ()))
        swapped = dict([*pairs, *((b, a) for a, b in pairs)])
        self._order = [swapped.get(i, i) for i in range(len(self.keypoint_names))]
        self._ids: list[Any] = []
        found = [self._objects(i) for i in range(len(dataset))]
        counts = torch.tensor([len(one["boxes"]) for one in found], dtype=torch.int64)
        self._images = torch.arange(len(dataset)).repeat_interleave(counts)
        self._rows = {key: torch.cat([one[key] for one in found]) for key in found[0]} if found else {}
        if not len(self._images):
            raise ValueError("no object has a labelled keypoint; expected at least one to crop")

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        return f"{self.dataset.name(int(self._images[i]))}#{int(self._rows['place'][i])}"

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        index = range(len(self))[index]
        row = {key: value[index] for key, value in self._rows.items()}
        image = int(self._images[index])
        there, mirrored = self._matrix(row["boxes"])
        back = invert_affine(there)
        pixels = cut_out(self.dataset.open(image), back[0], self.input_size)
        points = row["keypoints"][self._order] if mirrored else row["keypoints"]
        points = apply_affine(points[None].double(), there)
        heatmaps, weights = encode(points, self.input_size, sigma=self.sigma)
        meta = dict(image=image, place=int(row["place"]), image_id=self._ids[image], label=int(row["labels"]))
        meta |= dict(box=row["boxes"], area=float(row["area"]), score=1.0, matrix=back[0].float())
        return pixels, dict(heatmaps=heatmaps[0].float(), weights=weights[0].float(), meta=meta)

    def _matrix(self, box: Tensor) -> tuple[Tensor, bool]:
        """From the image to the crop (1, 2, 3), and whether that mirrors it."""
        factor, angle, mirrored = 0.0, 0.0, False
        if self.training:
            factor, angle = torch.randn(2).tolist()
            turned, mirrored = float(torch.rand(())) < 0.6, float(torch.rand(())) < self.hflip
            factor = max(-self.scale, min(factor * self.scale, self.scale))
            angle = max(-2 * self.rotation, min(angle * self.rotation, 2 * self.rotation)) if turned else 0.0
        matrix = crop_affine(box[None].double(), self.input_size, scale=1 + factor, rotation=angle)
        if mirrored:
            matrix[:, 0] *= -1
            matrix[:, 0, 2] += self.input_size[1]
        return matrix, mirrored

    def _objects(self, i: int) -> dict[str, Tensor]:
        """Rows of the objects of an image that are cropped."""
        target = self.dataset.target(i)
        self._ids.append(target["image_id"])
        boxes, points = target["boxes"].as_subclass(Tensor), target["keypoints"]
        sides = boxes[:, 2:] - boxes[:, :2]
        use = (target["iscrowd"] == 0) & (sides > 0).all(1) & (points[..., 2] > 0).any(1)
        rows = dict(boxes=boxes, keypoints=points, labels=target["labels"], area=target["area"])
        return {key: value[use] for key, value in (rows | dict(place=torch.arange(len(boxes)))).items()}


def cut_out(image: Image.Image, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Bytes (C, H, W) of a crop, given the matrix (2, 3) from it to the image."""
    ground = GROUND if image.mode == "RGB" else sum(GROUND) // len(GROUND)
    how: Any = dict(method=Image.Transform.AFFINE, resample=Image.Resampling.BILINEAR, fillcolor=ground)
    return F.pil_to_tensor(image.transform(size[::-1], data=matrix.flatten().tolist(), **how))
