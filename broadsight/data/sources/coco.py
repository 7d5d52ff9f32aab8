"""COCO files: boxes, masks and keypoints of objects, as the targets that torchvision's detectors train on."""

import json
import math
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from ..contents import of_arrays, of_file
from ..decoding import open_image
from ..dense.samples import find_images, homes, open_labelled
from ..inside import refuse_outside
from .coco_masks import MaskPool
from .sample_table import Names
from .walking import missing_files

NO_MASK = "annotations without a mask dropped"


class CocoDataset(Dataset):
    """Images and the objects in them, from a COCO file.

    Masks are those of pycocotools, pixel by pixel. An image comes the way round in which it was labelled (see
    `open_labelled`). An error on construction names the wrong annotation; what is usual is repaired, with a line in
    `notes`. Crowds and images without objects are kept.

    Args:
        images: The folder that its file names start from; looked for around the file if not given.
        masks: Whether targets have masks; annotations without one are dropped then.
    """

    def __init__(
        self,
        annotations: str | Path,
        images: str | Path | None = None,
        *,
        masks: bool = True,
        keypoints: bool = False,
        channels: int = 3,
    ):
        self.annotations, self.masks, self.keypoints, self.channels = Path(annotations), masks, keypoints, channels
        content = _read(self.annotations)
        self._read_categories(content["categories"])
        places = self._read_images(content["images"], images)
        self._read_annotations(content["annotations"], places)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, i: int) -> str:
        return self._names[i]

    def open(self, i: int) -> Image.Image:
        height, width = map(int, self._sizes[i])
        labels = f"{self.annotations.name} says"
        return open_labelled(self.images / self.name(i), (width, height), self.channels, labels)

    def _rows(self, i: int) -> np.ndarray:  # of the objects of an image
        i = range(len(self))[i]
        return self._order[self._ends[i] : self._ends[i + 1]]

    def target(self, i: int) -> dict[str, Any]:
        """The N objects of an image, which is not read for it; N may be 0."""
        rows, (height, width) = self._rows(i), map(int, self._sizes[i])
        boxes = torch.from_numpy(self._boxes[rows])  # x1 y1 x2 y2 in pixels inside of the image
        target = dict(
            boxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),  # ty: ignore[no-matching-overload]
            labelled_boxes=torch.from_numpy(self._labelled[rows]),  # as in the file: COCO's tools score against these
            labels=torch.from_numpy(self._labels[rows]).long(),  # from 1
            iscrowd=torch.from_numpy(self._crowds[rows]).long(),  # 1 for a crowd
            area=torch.from_numpy(self._areas[rows]),  # of the object, not of its box, as the file has it
            image_id=self._ids[i],
        )
        if self.masks:  # N H W of 0 and 1
            masks = np.zeros((len(rows), height, width), np.uint8)
            for mask, row in zip(masks, rows, strict=True):
                mask[:] = self._pool.draw(row, height, width)
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        if self._points is not None:  # N K 3: x, y and 0 not labelled, 1 hidden or 2 visible
            target["keypoints"] = torch.from_numpy(self._points[rows])
        return target

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        return self.open(index), self.target(index)

    def shown(self, i: int) -> list[int]:
        """Labels of the objects that count in a score, ascending: no crowds; with keypoints, if any is labelled."""
        rows = self._rows(i)
        counted = self._crowds[rows] == 0
        if self._points is not None:
            counted &= (self._points[rows][..., 2] > 0).any(1)
        return np.unique(self._labels[rows][counted]).tolist()

    def vouch(self, index: int, content: bool) -> bytes:
        rows = self._rows(index)
        objects = [self._labelled[rows], self._labels[rows], self._crowds[rows], self._areas[rows], self._sizes[index]]
        if self.masks:
            objects += [numbers for row in rows.tolist() for numbers in self._pool.numbers(row)]
        if self._points is not None:
            objects.append(self._points[rows])
        return of_file(self.images / self.name(index), content) + of_arrays(*objects)

    def _read_categories(self, categories: Any) -> None:
        try:
            names = {item["id"]: str(item["name"]) for item in categories}
            if not all(isinstance(category, int) for category in names):
                raise TypeError
            lists = {tuple(map(str, item["keypoints"])) for item in categories if item.get("keypoints")}
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f'{self.annotations}: a category has no "id" (a whole number) or no "name"') from None
        if not names or len(names) < len(categories):
            raise ValueError(f"{self.annotations} has {len(categories)} categories of {len(names)} different ids")
        # The label of the first category by id is 1, 0 being the background
        self._label_of = {category: label for label, category in enumerate(sorted(names), 1)}
        self.category_ids = {label: category for category, label in self._label_of.items()}
        self.classes = tuple(names[category] for category in sorted(names))
        if self.keypoints and len(lists) != 1:
            what = "different lists of keypoints" if lists else "no list of keypoints"
            raise ValueError(f"{self.annotations} has {what} in its categories; keypoints=True needs one for all")
        self.keypoint_names = next(iter(lists)) if len(lists) == 1 else ()

    def _read_images(self, images: Any, folder: str | Path | None) -> dict[Any, int]:
        """Fill names, ids and sizes (H, W), and return from an image's id to its place."""
        names, sizes, places = [], [], {}
        for item in images:
            try:
                names.append(str(item["file_name"]))
                if item["id"] in places:
                    raise ValueError(f"{self.annotations} has two images of id {item['id']}; ids must differ")
                places[item["id"]] = len(places)
            except (KeyError, TypeError):
                raise ValueError(f'{self.annotations}: image {len(names)} has no "id" or no "file_name"') from None
            sizes.append((item.get("height"), item.get("width")))
        if not names:
            raise ValueError(f"{self.annotations} lists no images; expected at least one")
        self.images = Path(folder) if folder is not None else find_images(self.annotations, names[0])
        refuse_outside(self.annotations, names, [self.images, *homes(self.annotations)])
        self._names, self._ids = Names(names), list(places)
        if missing := missing_files(self.images, names):
            where = f"{self.images / missing[0]}, image {self._ids[names.index(missing[0])]} of {self.annotations.name}"
            hint = "restore it or take it out"
            raise FileNotFoundError(f"{where}, is missing ({len(missing)} of {len(names)} are); {hint}")
        for i, size in enumerate(sizes):
            if size == (None, None):  # a few exporters leave it out
                try:
                    with open_image(self.images / names[i]) as image:
                        sizes[i] = image.height, image.width
                except Exception as error:
                    what = "cannot be read for its size, which the COCO file does not give"
                    raise ValueError(f"{self.images / names[i]} {what}: {error}") from None
            elif not all(isinstance(side, int | float) and 1 <= side < 1e6 for side in size):
                at = f"{self.annotations}: image {self._ids[i]}"
                raise ValueError(f"{at} has height, width = {size}; expected pixels")
        self._sizes = np.array(sizes, np.int32)
        return places

    def _read_annotations(self, annotations: Any, places: dict[Any, int]) -> None:
        """Check every annotation and keep its numbers in arrays; dicts of a million would be gigabytes."""
        numbers, points = array("d"), array("f")
        self._pool, counts, first = MaskPool(), Counter(), {}
        for number, item in enumerate(annotations, 1):
            if not isinstance(item, dict):
                raise ValueError(f"{self.annotations}: annotation number {number} is {str(item)[:40]}; expected a dict")
            name = item.get("id", f"number {number}")
            try:
                owner = _known(places, item, "image_id", "image")
                label = _known(self._label_of, item, "category_id", "category")
                height, width = map(int, self._sizes[owner])
                if len(item["bbox"]) != 4 or not all(map(math.isfinite, item["bbox"])):
                    raise ValueError(f"bbox is {str(item['bbox'])[:60]}; expected [x, y, width, height]")
                x, y, w, h = item["bbox"]
                whole = [x, y, x + w, y + h]
                box = [min(max(at, 0.0), side) for at, side in zip(whole, (width, height) * 2, strict=True)]
                area = float(item.get("area") or (box[2] - box[0]) * (box[3] - box[1]))
                joints = self._joints(item) if self.keypoints else ()
                x1, y1, x2, y2 = np.array(box, np.float32)  # as it is kept: a difference may be lost
                empty = x2 <= x1 or y2 <= y1
                unmasked = not empty and self.masks and not self._pool.add(item.get("segmentation"), height, width)
            except KeyError as error:
                raise ValueError(f'{self.annotations}: annotation {name} has no "{error.args[0]}"') from None
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self.annotations}: annotation {name}: {error}") from None
            reach = max(abs(a - b) for a, b in zip(whole, box, strict=True))
            kept = not (empty or unmasked)
            facts = {
                "crowds, which nothing is learned from": item.get("iscrowd"),
                'annotations marked "ignore", which COCO does not know, taken as any other': item.get("ignore"),
                "annotations of no area inside of their image dropped": empty,
                NO_MASK: unmasked,
                # by less than a pixel, boxes of every data set do
                "boxes that reached out of their image clipped to it": kept and reach > 1,
            }
            for what in (what for what, is_so in facts.items() if is_so):
                counts[what] += 1
                first.setdefault(what, name)
            if kept:
                numbers.extend((owner, label, bool(item.get("iscrowd")), area, *box, *whole))
                points.extend(joints)
        if counts[NO_MASK] and not numbers:
            raise ValueError(f"{self.annotations} has no masks, only boxes; open it with masks=False")
        self.notes = tuple(f"{what}: {count} (first: annotation {first[what]})" for what, count in counts.items())
        table = np.array(numbers).reshape(-1, 12)
        self._labels, self._crowds = table[:, 1].astype(np.int32), table[:, 2].astype(np.int8)
        self._areas, self._boxes, self._labelled = (
            table[:, at].astype(np.float32) for at in (3, np.s_[4:8], np.s_[8:])
        )
        shape = len(table), len(self.keypoint_names), 3
        self._points = np.array(points, np.float32).reshape(shape) if self.keypoints else None
        owners = table[:, 0].astype(np.int64)
        self._order = np.argsort(owners, kind="stable")
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(places)))])

    def _joints(self, item: dict) -> list[float]:
        """K times x, y, visibility; an object of a category without any has them unlabelled."""
        count = len(self.keypoint_names)
        points = item.get("keypoints") or [0.0] * 3 * count
        if len(points) != 3 * count or not all(map(math.isfinite, points)):
            raise ValueError(f"keypoints are {len(points)} numbers; expected x, y, visibility of {count} keypoints")
        return points


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file; expected a COCO JSON file")
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({str(error).splitlines()[0]}); expected a COCO file") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(f'{file} has no list "{key}"; expected a COCO file with images, annotations, categories')
    return content


def _known(table: dict[Any, int], item: dict, key: str, what: str) -> int:
    if isinstance(item[key], list | dict) or item[key] not in table:
        raise ValueError(f"{key} {item[key]} is the id of no {what}; add the {what} to the file or drop the annotation")
    return table[item[key]]
