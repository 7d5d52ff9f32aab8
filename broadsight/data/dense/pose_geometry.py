"""From a person's box to an upright crop of one size, and from keypoints to the heat maps that a pose model learns.

Coordinates are continuous, as COCO's boxes (to its keypoints add 0.5 on reading): the centre of the first pixel is at
0.5, and cell i of a heat map covers [i * stride, (i + 1) * stride) of the crop.
"""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from .transforms import GROUND, Pairs, mirrored_order

REACH = 3  # standard deviations; beyond these nothing is left of a Gaussian


def crop_affine(
    boxes: Tensor,
    input_size: tuple[int, int] = (256, 192),
    *,
    padding: float = 1.25,
    scale: float | Tensor = 1.0,
    rotation: float | Tensor = 0.0,
) -> Tensor:
    """Matrices (N, 2, 3) from pixels of the image to those of a crop (H, W) around each box (N, 4), x1 y1 x2 y2.

    Args:
        padding: How much larger the region that fills the crop is than the box, once that has the aspect of the crop.
        scale: Factor on that region, one or (N,); above 1 the person appears smaller.
        rotation: Degrees by which the image is turned counter-clockwise about the box's centre, one or (N,).
    """
    boxes = boxes if boxes.is_floating_point() else boxes.float()
    low, high = boxes[:, :2], boxes[:, 2:]
    centres, (width, height) = (low + high) / 2, (high - low).clamp(min=1).unbind(1)
    width = torch.maximum(width, height * (input_size[1] / input_size[0])) * padding
    zoom = input_size[1] / (width * torch.as_tensor(scale).to(centres))  # N
    angle = torch.deg2rad(torch.as_tensor(rotation).to(centres))
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    turn = torch.stack([cos, sin, -sin, cos], 1).unflatten(1, (2, 2))  # y points down
    middle = centres.new_tensor([input_size[1] / 2, input_size[0] / 2])
    return torch.cat([turn, middle[:, None] - turn @ centres[:, :, None]], 2)


def invert_affine(matrices: Tensor) -> Tensor:
    """The inverse matrices (N, 2, 3)."""
    back = torch.linalg.inv(matrices[:, :, :2])
    return torch.cat([back, -back @ matrices[:, :, 2:]], 2)


def apply_affine(points: Tensor, matrices: Tensor) -> Tensor:
    """Points (N, K, 2 or more) moved by matrices (N, 2, 3); columns beyond x and y are kept."""
    moved = points[..., :2] @ matrices[:, :, :2].mT + matrices[:, None, :, 2]
    return torch.cat([moved, points[..., 2:]], -1)


def encode(
    points: Tensor, input_size: tuple[int, int] = (256, 192), *, stride: int = 4, sigma: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Heat maps (N, K, ceil(H / stride), ceil(W / stride)) with a Gaussian of height 1 exactly at each keypoint, and
    weights (N, K): 1 for what is to be learned; 0, with an empty map, for points not labelled or beyond their reach.
    Points (N, K, 3) are x and y in pixels of the crop (H, W), and 0 if not labelled; `sigma` counts in cells."""
    cells = [-(-side // stride) for side in input_size]
    place = points[..., :2] / stride - 0.5  # in cells, whose centres are whole numbers: N K 2
    last = place.new_tensor([cells[1] - 1, cells[0] - 1])
    reached = ((place >= -REACH * sigma) & (place <= last + REACH * sigma)).all(-1)  # N K
    weights = ((points[..., 2] > 0) & reached).to(points.dtype)
    axes = [torch.arange(n, device=place.device, dtype=place.dtype) for n in reversed(cells)]  # x, y
    away = [(axis - place[..., i, None]) ** 2 for i, axis in enumerate(axes)]  # N K w, N K h
    columns, rows = (torch.exp(-(square / (2 * sigma**2))) for square in away)
    maps = rows[..., :, None] * columns[..., None, :]  # N K h w
    return torch.where(weights[..., None, None] > 0, maps, 0), weights


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
        pairs: Pairs = (),
        rotation: float = 40.0,
        scale: float = 0.3,
        hflip: float = 0.5,
        sigma: float = 2.0,
    ):
        self.dataset, self.training, self.input_size = dataset, training, input_size
        self.rotation, self.scale, self.hflip, self.sigma = rotation, scale, hflip, sigma
        self.keypoint_names = tuple(getattr(dataset, "keypoint_names", ()))
        self._order = mirrored_order(len(self.keypoint_names), pairs)
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
