"""What a dense model finds in images: drawn onto them, as COCO's results, as a table of boxes."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..data.decoding import UnreadableImage, within_memory
from ..data.dense.pose_geometry import crop_affine, cut_out, invert_affine
from ..data.names import CsvRows, unique_stems
from ..data.sources.unlabelled import Unlabelled
from ..dense.average_precision import to_results, write_results
from ..dense.scoring import ObjectScorer, PixelScorer, PoseScorer, moved_keypoints
from ..files import whole_file, write_json
from ..provenance import header
from ..runs.dense_model import DenseModel, pixels_of
from ..training.dense import crop_size
from ..visual.objects import draw_objects, draw_semantic, palette_png
from .classification import text_file

RESULTS = "results.json"


@dataclass
class Findings:
    """What was found in all images."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # as COCO's results, each with its `file_name`
    rows: list[tuple[str, str]] = field(default_factory=list)  # for the terminal: an image, and in words what is in it
    errors: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why


def predict_dense(
    run: DenseModel,
    source: Unlabelled,
    out: Path | None,
    *,
    threshold: float,
    boxes: Mapping[str, Tensor] | None,
    seen: Callable[[int], None],
    **views: Any,
) -> Findings:
    """Look at every image, and draw what was found into a folder if one is given.

    Args:
        threshold: The lowest score that is drawn and in_words; result files have everything.
        boxes: Of pose models, where the objects are: (N, 4) by name of the image; without it, the whole image.
        seen: Told how many images are done.
        views: Of each image, as `DenseModel.views` takes them.
    """
    source = source.in_channels(run.channels)
    names = [source.name(index) for index in range(len(source))]
    ids, stems = image_ids(names), unique_stems(names)
    findings, find = Findings(), finder(run, **views)
    for index, name in enumerate(names):
        try:
            with within_memory():
                image = source.open(index)
                with torch.inference_mode(), run.autocast():
                    found = find(image, None if boxes is None else boxes.get(Path(name).name))
                row, entries = (name, in_words(run, found, threshold)), []
                if run.task != "segment":
                    entries = to_results(ids[index], moved_keypoints(found, -run.keypoint_offset), run.category_ids)
                if out is not None:
                    _draw(run, image, found, out, f"{stems[index]}.png", threshold)
        except UnreadableImage as error:
            findings.errors[name] = str(error).removeprefix(f"{name}: ")
        else:
            findings.rows.append(row)
            findings.entries += [{**entry, "file_name": name} for entry in entries]
        seen(index + 1)
    return findings


def finder(run: DenseModel, **views: Any) -> Callable[[Image.Image, Tensor | None], Any]:
    """A function from an image, and for pose models the boxes in it, to what is there."""
    options: dict[str, Any] = dict(views=run.views(**views), device=run.device)
    if run.task == "segment":
        pixels = PixelScorer(run.classes, **options)
        return lambda image, _: pixels.find(run.model, pixels_of(image)).argmax(0).cpu()
    options["flip_pairs"] = run.flip_pairs
    if run.top_down:
        pose = PoseScorer(None, run.category_ids, run.classes, **options)
        return lambda image, boxes: _pose(run, pose, image, boxes)
    objects = ObjectScorer(run.task, run.category_ids, run.classes, **options)
    return lambda image, _: {key: value.cpu() for key, value in objects.find(run.model, [pixels_of(image)])[0].items()}


def _pose(run: DenseModel, scorer: PoseScorer, image: Image.Image, boxes: Tensor | None) -> dict[str, Tensor]:
    """Keypoints of the objects in boxes (N, 4), or of the one that fills the image."""
    boxes = torch.tensor([[0.0, 0.0, image.width, image.height]]) if boxes is None else boxes.float()
    size, points = crop_size(run.recipe), torch.zeros(0, len(run.keypoint_names), 3)
    if len(boxes):
        back = invert_affine(crop_affine(boxes.double(), size))
        crops = torch.stack([cut_out(image, matrix, size) for matrix in back])
        points = scorer.find(run.model, crops, back)
    labels, scores = torch.ones(len(boxes), dtype=torch.int64), points[..., 2]
    mean = scores.mean(1).clamp(0, 1)
    return dict(boxes=boxes, labels=labels, scores=mean, keypoints=points, keypoints_scores=scores)


def _draw(run: DenseModel, image: Image.Image, found: Any, out: Path, name: str, threshold: float) -> None:
    if run.task == "segment":
        drawn = {name: draw_semantic(image, found, run.classes), f"masks/{name}": palette_png(found)}
    else:
        lowest = 0.0 if run.top_down else threshold  # boxes of a pose model are given, not found
        options: dict[str, Any] = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
        drawn = {name: draw_objects(image, found, run.classes, threshold=lowest, **options)}
    for file, photo in drawn.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out / file) as unfinished:
            photo.save(unfinished, "PNG")


def in_words(run: DenseModel, found: Any, threshold: float) -> str:
    """In words: how many of what, or which share of the image is what."""
    if run.task == "segment":
        shares = torch.bincount(found.flatten(), minlength=len(run.classes)).double() / found.numel()
        order = shares.argsort(descending=True, stable=True)[:4].tolist()
        return ", ".join(f"{run.classes[row]} {100 * shares[row]:.0f} %" for row in order if shares[row] > 0.005)
    sure = found["scores"] >= (0 if run.top_down else threshold)
    counts = Counter(run.classes[label - 1] for label in found["labels"][sure].tolist())
    words = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.most_common())
    best = f" (best {found['scores'].max():.2f})" if len(found["scores"]) else ""
    return f"{words}{best}" if words else f"nothing above {threshold:g}{best}"


def image_ids(names: Sequence[str]) -> list[int]:
    """COCO's ids of images: the numbers that they are named by, where all are, or else 1, 2, 3, …"""
    stems = [Path(name).stem for name in names]
    numbers = [int(stem) for stem in stems if stem.isdecimal()]
    return numbers if len(set(numbers)) == len(names) else list(range(1, len(names) + 1))


def read_boxes(path: str | Path) -> dict[str, Tensor]:
    """Boxes (N, 4) by file name, from a COCO file or from results that `predict` wrote."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a COCO .json, or results.json of a detector")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            names = {image["id"]: Path(image["file_name"]).name for image in content["images"]}
            listed = [(names[entry["image_id"]], entry["bbox"]) for entry in content["annotations"]]
        else:
            listed = [(Path(entry["file_name"]).name, entry["bbox"]) for entry in content if entry["score"] >= 0.3]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no boxes ({error}); expected a COCO .json, or results.json") from None
    boxes: dict[str, list[list[float]]] = defaultdict(list)
    for name, (x, y, width, height) in listed:
        boxes[name].append([x, y, x + width, y + height])
    return {name: torch.tensor(rows) for name, rows in boxes.items()}


def write_findings(
    findings: Findings, run: DenseModel, *, results: Path | None, table: Path | None, command: str
) -> None:
    """Write COCO's results with how they came about beside them, and a CSV file of boxes."""
    if results is not None and run.task != "segment":
        write_results(findings.entries, results)
    if table is not None:
        names = {number: run.classes[label - 1] for label, number in run.category_ids.items()}
        with text_file(str(table)) as file:
            rows = CsvRows(file)
            rows.write(["file", "class", "score", "x", "y", "width", "height"])
            for entry in findings.entries:
                rows.write([entry["file_name"], names[entry["category_id"]], entry["score"], *entry["bbox"]])
    place = results or table
    if place is not None:
        record = {
            "model": {name: getattr(run, name) for name in ("title", "source", "parameters", "task", "precision")},
            "classes": list(run.classes),
            "images": {"read": len(findings.rows), "failed": findings.errors},
            **header(command),
        }
        write_json(record, place.with_name(f"{place.name}.settings.json"))
