"""Detectors, segmenters and pose models as they are exported: raw outputs, and in words what makes findings of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...data.decoding import UnreadableImage, decode
from ...data.scenes import Scenes
from ...layers import PartialAttention
from ...runs.dense_model import DenseModel, open_dense
from ...training.run_folder import RunFolder
from ..session import Description, Session
from ..subject import Subject, answers, provenance, spread, to_show
from .raw import CELL, RawModel, check_exportable, raw_model
from .session import crops, differences, find, whole_image

NO_SIZE = 224  # pixels of scenes for a model that takes images as they come
EXAMPLE_SIZE = 9 * CELL, 17 * CELL  # to capture for any size: no map of it has equal sides or one single cell
WHY_ONE_SIZE = {
    "exact": "its head is made for {sides}, to which every image is resized",
    "crops": "it looks at crops of {sides}",
    "fit": "its backbone brings all images to one",
}
Shown = tuple[Image.Image, np.ndarray | None]  # to compare on; for pose models with boxes (N, 4), or None for all of it


def of_dense(
    run: str | Path | DenseModel,
    command: str,
    images: Sequence[str] = (),
    count: int = 8,
    *,
    size: int | None = None,
    any_size: bool = False,
    canvas: tuple[int, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Subject:
    """A dense run, on the CPU, as `of_classifier` a classifier.

    Args:
        count: Of images to try; of pose models, of crops.
        size: Pixels of the shorter side to look at images in, instead of those it was trained in.
        any_size: Whether sizes will be left open; it changes the notes.
        canvas: (height, width) that images are fitted into where sizes are fixed, multiples of 32; a square if None.
    """
    if config is None:  # what the run's folder says of it
        config = RunFolder(run.path if isinstance(run, DenseModel) else run).dense_config()
        check_exportable(config["broadsight"]["settings"]["head"], config["broadsight"]["task"])
    if isinstance(run, str | Path):
        run = open_dense(run, device="cpu", size=size)
    raw = raw_model(run, canvas=canvas)
    height, width = raw.size
    names = run.task, run.title, run.path.absolute().name or run.title, run.classes, raw.outputs
    image = {"channels": run.channels, "height": height, "width": width, "any_batch": True, "any_size": False}
    about = provenance(run.model, command, dict(config))
    description = Description(*names, image, raw.preprocessing, about, decoding=raw.decoding)
    shown, words, notes = _shown(run, raw, images, count)
    if raw.decoding["kind"] == "pixels" and not any_size:
        other = "; --any-size sees them as the run does" if raw.any_size else ""
        notes = (*notes, f"images that are not square are made to fit {height}x{width} pixels{other}")
    why = WHY_ONE_SIZE[raw.preprocessing["way"]].format(sides=f"{height}x{width}")
    chooses = any(isinstance(module, PartialAttention) for module in raw.model.modules())
    if chooses:  # rounding decides which of equals are foreground, and all positions of a padding are equal
        words = f"{words}, stretched to leave no padding"

    def model(batch: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(raw.outputs, answers(raw.model, batch), strict=True))

    def follow(batch: np.ndarray, found: dict[str, np.ndarray]) -> list[np.ndarray]:
        queries: Any = raw.model
        return answers(queries.following, batch, found["chosen"])

    def findings(session: Session) -> dict[str, float]:
        """How far what an artefact finds in images is from what the model in torch does, decoded alike."""
        said = session.description
        each = [differences(find(session, said, *one), find(model, said, *one)) for one in shown]
        differing, pixels = zip(*(one.values() for one in each), strict=True)
        return {"differing": float(np.mean(differing)), "pixels": float(np.max(pixels))}

    def photos(side: int | None) -> list[np.ndarray]:
        return _images(description, shown, count, side is not None, chooses)

    example, obstacle = (EXAMPLE_SIZE, "") if raw.any_size else (None, f"{why}; leave the option out")
    followed = follow if "chosen" in raw.outputs else None
    return Subject(raw.model, description, photos, words, notes, obstacle, example, followed, findings)


def _images(description: Description, shown: Sequence[Shown], count: int, free: bool, filled: bool) -> list[np.ndarray]:
    """The images as (1, C, H, W); with `free` sizes the first in one that is a multiple of nothing, the others each in
    its own; `filled` stretches them to where they would be padded, and then the first is in multiples of cells."""
    if description.preprocessing["way"] == "crops" and not filled:
        return [image[None] for photo, boxes in shown for image in crops(description, photo, boxes)[0]][:count]
    if not free:
        return [_image(description, photo, filled) for photo, _ in shown]
    said, image = description.preprocessing, description.image
    side = said["short_side"] or min(image["height"], image["width"]) // 2
    height, width = side // 2 * 2 + 3, side * 4 // 3 // 2 * 2 + 5
    if filled:  # else the model pads
        height, width = (-(-side // CELL) * CELL for side in (height, width))
    said = {**said, "short_side": height, "long_side": None}
    odd = replace(description, preprocessing=said, image={**image, "height": height, "width": width})
    own = replace(description, image={**image, "any_size": True})
    return [_image(own if place else odd, photo, filled) for place, (photo, _) in enumerate(shown)]


def _image(description: Description, photo: Image.Image, filled: bool) -> np.ndarray:
    if not filled:
        return whole_image(description, photo)[0][None]
    image, said = description.image, description.preprocessing
    if image["any_size"]:
        height, width = whole_image(description, photo)[1].canvas
        image = {**image, "height": height, "width": width, "any_size": False}
    exact = {"antialias": True, **said, "way": "exact"}
    return whole_image(replace(description, image=image, preprocessing=exact), photo)[0][None]


def _shown(run: DenseModel, raw: RawModel, images: Sequence[str], count: int) -> tuple[list[Shown], str, Any]:
    """Images, what they are, and notes."""

    def own() -> tuple[Any, str]:
        val = run.own_data().val
        return _read(val, count, boxes=run.top_down) if len(val) else (), run.settings["data"]

    found, words, notes = to_show(images, run.channels, own)
    if found is not None:
        return _read(found, count) if images else found, words, notes
    side = raw.preprocessing.get("short_side") or (NO_SIZE if raw.preprocessing["way"] == "fit" else min(raw.size))
    scenes = Scenes(count, size=(side, side * 4 // 3), split="test")
    drawn = [scenes.scene(place) for place in range(count)]
    boxed = [(decode(Image.fromarray(x.image), run.channels), x.boxes if run.top_down else None) for x in drawn]
    return boxed, words, notes


def _read(source: Any, count: int, *, boxes: bool = False) -> list[Shown]:
    """So many images from all over a source, without those that cannot be read."""
    found, wrong = [], []
    for place in spread(len(source), count):
        try:
            image = source.open(place)
        except UnreadableImage as error:
            wrong.append(str(error))
            continue
        objects = np.asarray(source.target(place)["boxes"], np.float32).reshape(-1, 4) if boxes else np.zeros((0, 4))
        wide = (objects[:, 2:] > objects[:, :2]).all(1)
        found.append((image, objects[wide] if wide.any() else None))
    if not found:
        raise ValueError(f"none of the {len(wrong)} images to compare on can be read; {wrong[0]}")
    return found
