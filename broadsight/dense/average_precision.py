"""Average precision of boxes, masks and keypoints by COCO's own definitions, and predictions in its result format."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from ..files import write_text

INSTALL = 'run: pip install "broadsight[det]"'
# Deviation between annotators of the 17 points of a person, relative to its size, in thousandths: COCO's weights.
PERSON = (26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89)
COUNTS = [1, 10, 100]  # boxes or masks of a class that count in an image, as in COCO; of poses, 20
MAIN = {"": slice(None), "50": 0, "75": 5}  # where among IoU 0.5, 0.55, ..., 0.95 ap, ap50 and ap75 are
SIZES = ("_small", "_medium", "_large")  # COCO's areas: up to 32 x 32 pixels, up to 96 x 96, and above
COCO_NAMES = {"box": "bbox", "mask": "segm", "keypoint": "keypoints"}
AT_ONCE = 100_000  # predictions, each of which takes COCO's tools some kilobytes
Objects = dict[str, Any]  # columns of N objects
Images = Sequence[Objects]
Table = tuple[np.ndarray, np.ndarray]


class AveragePrecision:
    """Collects predictions and targets of images, and compares them by COCO's own tools (torchmetrics has no AP of
    keypoints). Masks are kept as run lengths, which fit into memory. An image that comes again replaces itself.

    Args:
        kinds: Some of "box", "mask" and "keypoint".
        category_ids, class_names: From a label to the id of its category, and the names in the order of the labels.
    """

    def __init__(self, kinds: Sequence[str], category_ids: Mapping[int, int], class_names: Sequence[str]):
        coco_evaluation(), coco_masks()  # say what is missing before hours of predictions
        self.kinds, self.category_ids, self.class_names = tuple(kinds), category_ids, class_names
        self.reset()

    def reset(self) -> None:
        self._images: dict[int | str, Objects] = {}
        self._tables: dict[str, Table] = {}

    def update(self, image_id: Any, size: Sequence[int], prediction: Mapping[str, Tensor], target: Objects) -> None:
        """Add one image of height and width; the order of ids decides between equal scores, as in COCO's tools.

        A prediction has boxes (M, 4) as x1 y1 x2 y2, labels and scores (M,), and if their kind was asked for masks (M,
        1, H, W) as probabilities and keypoints (M, K, 3). A target has the same without scores, iscrowd (N,), else
        none, and area (N,), else that of mask or box; its labelled_boxes go before boxes, keypoints not labelled are 0.
        """
        if not isinstance(image_id, str):
            image_id = int(image_id)  # tensors, as collating makes, are not equal as keys
        size = (int(size[0]), int(size[1]))
        try:
            scores, labels = _numbers(prediction["scores"]), _numbers(prediction["labels"])
            if not np.isfinite(scores).all():
                raise ValueError("scores are not all finite; the model has diverged")
            rows = first_of_each(labels, scores, COUNTS[-1])
            if len(rows) < len(scores):
                prediction = {key: values[rows] for key, values in prediction.items()}
            found = self._objects(prediction, size) | {"scores": scores[rows]}
            there = self._objects({**target, "boxes": target.get("labelled_boxes", target["boxes"])}, size)
        except KeyError as error:
            raise ValueError(f"image {image_id} has no {error.args[0]}; expected it for AP of {self.kinds}") from None
        except ValueError as error:
            raise ValueError(f"image {image_id}: {error}") from None
        there["crowds"] = _numbers(target.get("iscrowd", np.zeros(len(there["labels"])))) != 0
        drawn = "mask" if "masks" in there else "box"
        there["areas"] = _numbers(target["area"]) if "area" in target else areas_of(drawn, size, there)
        # Columns: labels (N,), boxes (N, 4) as x y w h, N masks as run lengths, keypoints (N, 3 K), areas and so on
        self._images[image_id] = {"size": size, "there": there, "found": found}
        self._tables.clear()

    def state(self) -> list[tuple[int | str, Objects]]:
        return list(self._images.items())

    def merge(self, others: Iterable[list[tuple[int | str, Objects]]]) -> None:
        for image_id, image in chain.from_iterable(others):
            # Two processes may have seen an image in different batches, with rounding: all must keep the same one
            known = self._images.get(image_id, image)
            self._images[image_id] = max(known, image, key=lambda one: one["found"]["scores"].tobytes())
        self._tables.clear()

    def compute(self) -> dict[str, float]:
        """Figures in per cent by name, such as box_ap50, whose meanings are in visual/metrics.yaml; nan for undefined
        ones, such as AP of large objects where there are none."""
        figures = {}
        for kind in self.kinds:
            (precision, recall), sizes = self._table(kind), SIZES[1:] if kind == "keypoint" else SIZES
            parts = {f"ap{name}": precision[at, ..., 0, -1] for name, at in MAIN.items()}
            parts |= {f"ap{name}": precision[..., place, -1] for place, name in enumerate(sizes, 1)}
            if kind == "keypoint":
                parts |= {f"ar{name}": recall[at, ..., 0, -1] for name, at in MAIN.items()}
            else:
                parts |= {f"ar{count}": recall[..., 0, place] for place, count in enumerate(COUNTS)}
            parts |= {f"ar{name}": recall[..., place, -1] for place, name in enumerate(sizes, 1)}
            figures |= {f"{kind}_{name}": _mean_percent(part) for name, part in parts.items()}
        return figures

    def coverage(self) -> tuple[int, int]:
        """Number of classes with objects that count, of the last kind, and of all classes."""
        precision, _ = self._table(self.kinds[-1])
        return int((precision[..., 0, -1] > -1).any((0, 1)).sum()), len(self.category_ids)

    def per_class(self) -> list[Objects]:
        """A row for each class: name, objects (without crowds), and ap, ap50, ap75 of each kind in per cent."""
        there = [image["there"] for image in self._images.values()]
        labels = np.concatenate([np.zeros(0, np.int64), *(one["labels"][~one["crowds"]] for one in there)])
        rows = []
        for place, (label, name) in enumerate(zip(sorted(self.category_ids), self.class_names, strict=True)):
            row: dict[str, Any] = {"name": name, "objects": int((labels == label).sum())}
            for kind in self.kinds:
                precision = self._table(kind)[0][:, :, place, 0, -1]
                row |= {f"{kind}_ap{name}": _mean_percent(precision[at]) for name, at in MAIN.items()}
            rows.append(row)
        return rows

    def _objects(self, tensors: Mapping[str, Any], size: tuple[int, int]) -> Objects:
        """The values of N objects that the kinds need."""
        labels = known_labels(tensors["labels"], self.category_ids)
        objects: Objects = {"labels": labels, "boxes": as_coco(torch.as_tensor(tensors["boxes"]))}
        if "mask" in self.kinds:
            drawn, objects["masks"] = encode_masks(tensors["masks"])
            if drawn != size:
                raise ValueError(f"masks are of height, width {drawn}; expected {size} as the image is")
        if "keypoint" in self.kinds:
            objects["keypoints"] = tensors["keypoints"].detach().float().cpu().flatten(1).numpy()
        return objects

    def _table(self, kind: str) -> Table:
        """Precision (10, 101, C, areas, counts) and recall (10, C, areas, counts), -1 if undefined."""
        if kind not in self._tables:
            order = sorted(self._images, key=lambda name: (isinstance(name, str), name))
            images = [self._images[name] for name in order]
            labels, sigmas = sorted(self.category_ids), _sigmas(images) if kind == "keypoint" else None
            every = np.concatenate([np.zeros(0, np.int64), *(image["found"]["labels"] for image in images)])
            groups = group(labels, np.bincount(every, minlength=max(labels) + 1), AT_ONCE)
            precision, recall = zip(*(compare(kind, images, some, sigmas) for some in groups), strict=True)
            self._tables[kind] = np.concatenate(precision, 2), np.concatenate(recall, 1)
        return self._tables[kind]


def _sigmas(images: Images) -> list[float]:
    """Tolerance of each keypoint relative to the object's size."""
    points = (image[part]["keypoints"] for image in images for part in ("there", "found"))
    counts = {one.shape[1] // 3 for one in points if len(one)}
    if len(counts) > 1:
        raise ValueError(f"objects have {sorted(counts)} keypoints; expected the same number everywhere")
    count = max(counts, default=len(PERSON))
    return [one / 1000 for one in PERSON] if count == len(PERSON) else [0.05] * count


def _numbers(values: Any) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().double().numpy()


def _mean_percent(part: np.ndarray) -> float:
    defined = part[part > -1]
    return 100 * float(defined.mean()) if len(defined) else float("nan")


def compare(kind: str, images: Images, labels: Sequence[int], sigmas: Sequence[float] | None) -> Table:
    """Precision (10, 101, C, A, counts) by IoU and recall, and recall (10, C, A, counts), of C classes; -1 where there
    is nothing. Of equal scores, that of an earlier image goes first; sigmas are the tolerances of keypoints."""
    coco, evaluation = coco_evaluation()
    counts = [20] if kind == "keypoint" else COUNTS
    sizes = [{"id": i, "height": image["size"][0], "width": image["size"][1]} for i, image in enumerate(images, 1)]
    content = {"images": sizes, "categories": [{"id": label, "name": str(label)} for label in labels]}
    rows = annotations(kind, images, "there", labels), annotations(kind, images, "found", labels, counts[-1])
    tables = [coco(content | {"annotations": some}) for some in rows]
    run = evaluation(*tables, COCO_NAMES[kind], kpt_oks_sigmas=sigmas)
    run.params.catIds = list(labels)  # by default it leaves out classes without poses
    run.params.maxDets = counts
    run.evaluate()
    return run.eval["precision"], run.eval["recall"]


def coco_evaluation() -> tuple[Any, Any]:
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise ImportError(f"average precision needs faster-coco-eval; {INSTALL}") from None
    return COCO, COCOeval_faster


def group(labels: Sequence[int], numbers: np.ndarray, most: int) -> list[list[int]]:
    """Labels in groups with at most `most` predictions together, or one label: classes are compared independently."""
    groups: list[list[int]] = [[]]
    for label in labels:
        if groups[-1] and numbers[[*groups[-1], label]].sum() > most:
            groups.append([])
        groups[-1].append(label)
    return groups


def annotations(kind: str, images: Images, part: str, labels: Sequence[int], most: int | None = None) -> list[Objects]:
    """Targets or predictions of some labels as COCO's annotations; of predictions, the best `most` of each label."""
    rows: list[Objects] = []
    for number, image in enumerate(images, 1):
        size, objects = image["size"], image[part]
        columns = {"category_id": objects["labels"], "bbox": objects["boxes"]}
        if most is None:
            keep = np.flatnonzero(np.isin(objects["labels"], labels))
            columns |= {"area": objects["areas"], "iscrowd": objects["crowds"].astype(int)}
        else:
            keep = first_of_each(objects["labels"], objects["scores"], most)
            keep = keep[np.isin(objects["labels"][keep], labels)]
            columns |= {"area": areas_of(kind, size, objects), "score": objects["scores"]}
        if kind == "keypoint":
            points = objects["keypoints"]
            columns |= {"keypoints": points, "num_keypoints": (points[:, 2::3] > 0).sum(1)}
        lists = {name: values[keep].tolist() for name, values in columns.items()}
        if kind == "mask":
            lists["segmentation"] = [{"size": list(size), "counts": objects["masks"][i]} for i in keep]
        for values in zip(*lists.values(), strict=True):  # ids from 1: COCO's tools take 0 for none
            rows.append(dict(zip(lists, values, strict=True), image_id=number, id=len(rows) + 1))
    return rows


def areas_of(kind: str, size: tuple[int, int], objects: Objects) -> np.ndarray:
    """(N,) areas as COCO sorts predictions by them: of the box, the mask, or around the keypoints."""
    if kind == "mask":
        pixels = coco_masks().area([{"size": list(size), "counts": text} for text in objects["masks"]])
        return np.asarray(pixels, np.float64).reshape(-1)
    if kind == "box" or not len(objects["labels"]):
        return objects["boxes"][:, 2] * objects["boxes"][:, 3]
    x, y = (objects["keypoints"][:, start::3].astype(np.float64) for start in (0, 1))
    return np.ptp(x, axis=1) * np.ptp(y, axis=1)


def first_of_each(labels: np.ndarray, scores: np.ndarray, most: int) -> np.ndarray:
    """Indices of the `most` highest scores of each label, ascending; of equal scores the first count."""
    if len(labels) <= most:
        return np.arange(len(labels))
    by_score = np.argsort(-scores, kind="stable")
    order = by_score[np.argsort(labels[by_score], kind="stable")]  # by label, then by score
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    return np.sort(order[rank < most])


def to_results(image_id: int | str, prediction: Mapping[str, Tensor], category_ids: Mapping[int, int]) -> list[Objects]:
    """Predictions for an image, in pixels of it, as entries of a result file; see `AveragePrecision.update`."""
    labels = known_labels(prediction["labels"], category_ids)
    columns: dict[str, list] = {
        "category_id": [category_ids[label] for label in labels.tolist()],
        "score": prediction["scores"].detach().cpu().double().numpy().round(6).tolist(),
        "bbox": as_coco(prediction["boxes"]).round(3).tolist(),
    }
    if "masks" in prediction:
        size, texts = encode_masks(prediction["masks"])
        columns["segmentation"] = [{"size": list(size), "counts": text.decode()} for text in texts]
    if "keypoints" in prediction:
        columns["keypoints"] = prediction["keypoints"].detach().cpu().double().flatten(1).numpy().round(3).tolist()
    rows = zip(*columns.values(), strict=True)
    return [{"image_id": image_id, **dict(zip(columns, row, strict=True))} for row in rows]


def as_coco(boxes: Tensor) -> np.ndarray:
    """Boxes (N, 4), x1 y1 x2 y2, as x y w h."""
    return box_convert(boxes.detach().cpu().double().reshape(-1, 4), "xyxy", "xywh").numpy()


def write_results(entries: Iterable[dict[str, Any]], path: str | Path) -> None:
    write_text(json.dumps(list(entries), allow_nan=False), path)


def encode_masks(masks: Tensor) -> tuple[tuple[int, int], list[bytes]]:
    """Height and width of masks (M, 1, H, W) or (M, H, W), and their pixels above 0.5 as COCO's run lengths."""
    height, width = masks.shape[-2:]
    inside = (masks.detach().reshape(-1, height, width) > 0.5).view(torch.uint8)
    columns = inside.mT.contiguous().cpu().numpy()  # runs go down the columns
    return (height, width), [run["counts"] for run in coco_masks().encode(columns.transpose(2, 1, 0))]


def coco_masks() -> ModuleType:
    try:
        from pycocotools import mask  # its encoder takes a fifth of the other package's time
    except ImportError:
        raise ImportError(f"masks as run lengths need pycocotools; {INSTALL}") from None
    return mask


def known_labels(labels: Tensor, category_ids: Mapping[int, int]) -> np.ndarray:
    """(N,) labels, after a check that each has a category."""
    listed = labels.detach().cpu().numpy().astype(np.int64).reshape(-1)
    if unknown := set(listed.tolist()) - category_ids.keys():
        known = f"{min(category_ids)} to {max(category_ids)}"
        raise ValueError(f"label {min(unknown)} has no category; expected labels {known}")
    return listed
