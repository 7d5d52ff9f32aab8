"""What a dense model finds in images: drawn onto them, as COCO's results, as a table of boxes."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..data.decoding import UnreadableImage, within_memory
from ..data.dense.pose_crops import cut_out
from ..data.dense.pose_geometry import crop_affine, invert_affine
from ..data.names import CsvRows, unique_stems
from ..data.sources.unlabelled import Unlabelled
from ..dense.average_precision import to_results, write_results
from ..dense.scoring import ObjectScorer, PixelScorer, PoseScorer, moved_keypoints
from ..files import whole_file, write_json
from ..provenance import header
from ..runs.dense_model import DenseModel, pixels_of
from ..training.dense import crop_size
from ..visual.objects import draw_objects, draw_semantic, palette_png

RESULTS, SETTINGS, CLASS_MAPS = "results.json", "settings.json", "masks"


@dataclass
class Findings:
    """What was found in all images.

    Args:
        entries: Objects as COCO's results have them, each with the name of its file.
        rows: What the terminal shows of each image: its name, and in words what is in it.
        errors: Images that could not be read, and why.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def predict_dense(
    run: DenseModel,
    source: Unlabelled,
    out: Path | None,
    *,
    threshold: float = 0.5,
    flip: bool = False,
    scales: tuple[float, ...] = (1.0,),
    slide: bool = False,
    boxes: Mapping[str, Tensor] | None = None,
    seen: Callable[[int], None] = lambda count: None,
) -> Findings:
    """Look at every image, and draw what was found into a folder if one is given.

    Args:
        out: PNG files of the images' names, and for segmentation their class maps in `masks`.
        threshold: The lowest score that is drawn and told; result files have everything.
        flip, scales, slide: Views of each image.
        boxes: Of pose models, where the objects are: (N, 4) by name of the image; without it, the whole image.
        seen: Told how many more images are done.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"--threshold {threshold}; expected 0 to 1")
    source = source.in_channels(run.channels)
    names = [source.name(index) for index in range(len(source))]
    ids, drawn_as = image_ids(names), output_names(names)
    findings = Findings()
    find = finder(run, flip=flip, scales=scales, slide=slide)
    for index, name in enumerate(names):
        try:
            with within_memory():
                image = source.open(index)
                with torch.inference_mode():
                    found = find(image, None if boxes is None else boxes.get(Path(name).name))
                row, entries = (name, told(run, found, threshold)), []
                if run.task != "segment":
                    entries = to_results(ids[index], moved_keypoints(found, -run.keypoint_offset), run.category_ids)
                if out is not None:
                    _draw(run, image, found, out, drawn_as[index], threshold)
        except UnreadableImage as error:
            findings.errors[name] = str(error).removeprefix(f"{name}: ")
        else:
            findings.rows.append(row)
            findings.entries += [{**entry, "file_name": name} for entry in entries]
        seen(1)
    return findings


def finder(run: DenseModel, **views: Any) -> Callable[[Image.Image, Tensor | None], Any]:
    """A function from an image, and for pose models the boxes in it, to what is there."""
    shown = run.views(**views)
    options: dict[str, Any] = dict(views=shown, device=run.device)
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
    size = crop_size(run.recipe)
    if not len(boxes):
        empty = dict(boxes=boxes, labels=torch.zeros(0, dtype=torch.int64), scores=torch.zeros(0))
        return empty | dict(
            keypoints=torch.zeros(0, len(run.keypoint_names), 3),
            keypoints_scores=torch.zeros(0, len(run.keypoint_names)),
        )
    back = invert_affine(crop_affine(boxes.double(), size))
    crops = torch.stack([cut_out(image, matrix, size) for matrix in back])
    points = scorer.find(run.model, crops, back)
    return dict(
        boxes=boxes,
        labels=torch.ones(len(boxes), dtype=torch.int64),
        scores=points[..., 2].mean(1).clamp(0, 1),
        keypoints=points,
        keypoints_scores=points[..., 2],
    )


def _draw(run: DenseModel, image: Image.Image, found: Any, out: Path, name: str, threshold: float) -> None:
    if run.task == "segment":
        photo = draw_semantic(image, found, run.classes)
        _save(palette_png(found), out / CLASS_MAPS / name)
    else:
        lowest = 0.0 if run.top_down else threshold  # boxes of a pose model are given, not found
        options: dict[str, Any] = dict(skeleton=run.skeleton, keypoint_threshold=run.keypoint_threshold)
        photo = draw_objects(image, found, run.classes, threshold=lowest, **options)
    _save(photo, out / name)


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        image.save(unfinished, "PNG")


def told(run: DenseModel, found: Any, threshold: float) -> str:
    """In words: how many of what, or which share of the image is what."""
    if run.task == "segment":
        shares = torch.bincount(found.flatten(), minlength=len(run.classes)).double() / found.numel()
        order = shares.argsort(descending=True, stable=True)[:4].tolist()
        return ", ".join(
            f"{run.classes[index]} {100 * shares[index]:.0f} %" for index in order if shares[index] > 0.005
        )
    sure = found["scores"] >= (0 if run.top_down else threshold)
    counts = Counter(run.classes[label - 1] for label in found["labels"][sure].tolist())
    words = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.most_common())
    best = f" (best {found['scores'].max():.2f})" if len(found["scores"]) else ""
    return f"{words}{best}" if words else f"nothing above {threshold:g}{best}"


def image_ids(names: Sequence[str]) -> list[int]:
    """COCO's ids of images: the numbers that they are named by, where all are, or else 1, 2, 3, …"""
    stems = [Path(name).stem for name in names]
    if all(stem.isdecimal() for stem in stems) and len({int(stem) for stem in stems}) == len(stems):
        return [int(stem) for stem in stems]
    return list(range(1, len(names) + 1))


def output_names(names: Sequence[str]) -> list[str]:
    """A file for each image, of its own name; with a number where two have the same."""
    return [f"{stem}.png" for stem in unique_stems(names)]


def read_boxes(path: str | Path) -> dict[str, Tensor]:
    """Boxes (N, 4) by file name, from a COCO file or from results that `predict` wrote."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a COCO .json, or results.json of a detector")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            names = {image["id"]: Path(image["file_name"]).name for image in content["images"]}
            listed = [(names[entry["image_id"]], entry["bbox"]) for entry in content["annotations"]]
        else:
            listed = [(Path(entry["file_name"]).name, entry["bbox"]) for entry in content if entry["score"] >= 0.3]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no boxes ({error}); expected a COCO .json, or results.json") from None
    boxes: dict[str, list[list[float]]] = {}
    for name, (x, y, width, height) in listed:
        boxes.setdefault(name, []).append([x, y, x + width, y + height])
    return {name: torch.tensor(rows) for name, rows in boxes.items()}


def write_findings(
    findings: Findings, run: DenseModel, *, results: Path | None, table: Path | None, command: str = ""
) -> None:
    """Write COCO's results with how they came about beside them, and a CSV file of boxes."""
    if results is not None and run.task != "segment":
        write_results(findings.entries, results)
    if table is not None:
        options: dict[str, Any] = dict(encoding="utf-8", errors="surrogateescape", newline="")  # names keep their bytes
        with whole_file(table) as unfinished, open(unfinished, "w", **options) as file:
            rows = CsvRows(file)
            names = {number: run.classes[label - 1] for label, number in run.category_ids.items()}
            rows.write(["file", "class", "score", "x", "y", "width", "height"])
            for entry in findings.entries:
                rows.write([entry["file_name"], names[entry["category_id"]], entry["score"], *entry["bbox"]])
    place = results or table
    if place is not None:
        record = {
            "model": {"title": run.title, "source": str(run.path), "parameters": run.parameters, "task": run.task},
            "classes": list(run.classes),
            "images": {"read": len(findings.rows), "failed": findings.errors},
            **header(command),
        }
        write_json(record, place.with_name(f"{place.name}.settings.json"))
