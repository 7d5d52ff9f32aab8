"""Runs of dense tasks that take a moment, and a COCO file with a few small images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from broadsight.training.request import Request

PROPOSALS = {f"rpn_{when}_nms_top_n_{mode}": n for when, n in (("pre", 50), ("post", 20)) for mode in ("train", "test")}
# Heads in thousandths of their size, over a model that is made for tests.
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "retinanet": dict(width=32),
    "mask_rcnn": dict(width=32, box_batch_size_per_image=16, box_detections_per_img=5, **PROPOSALS),
    "semantic_fpn": dict(pyramid_channels=32, channels=16),
    "simple_baseline": dict(channels=16),
}
TASKS = {"retinanet": "detect", "mask_rcnn": "instances", "semantic_fpn": "segment", "simple_baseline": "keypoints"}


def ask_dense(head: str, out: Path, data: str = "scenes:8", **options: Any) -> Request:
    """A request for one epoch of four updates; `changes` come on top of what makes it small."""
    changes = dict(epochs=1, warmup_epochs=0, batch_size=2, image_size=64) | options.pop("changes", {})
    small: dict[str, Any] = dict(data=data, task=TASKS[head], head=head, head_args=SMALL_HEADS[head], out=str(out))
    small |= dict(model="test_resnet", workers=0, threads=1, device="cpu", report=False)
    return Request(**small | options, set=changes)


def write_coco(folder: Path, count: int = 4, side: int = 64) -> Path:
    """Images of one bright square each on a dark ground, of two classes by its colour; the JSON file."""
    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        pixels = random.integers(0, 60, (side, side + 16, 3), dtype=np.uint8)
        x, y, size, kind = 8 * (number % 4), 6 * (number % 3), 24 + 4 * (number % 3), number % 2
        pixels[y : y + size, x : x + size, kind] = 240
        Image.fromarray(pixels).save(folder / "images" / f"{number:012d}.png")
        images.append(dict(id=number, file_name=f"{number:012d}.png", height=side, width=side + 16))
        corners = [x, y, x + size, y, x + size, y + size, x, y + size]
        about = dict(id=number, image_id=number, category_id=(7, 3)[kind], iscrowd=0, segmentation=[corners])
        annotations.append(about | dict(bbox=[x, y, size, size], area=size * size))
    categories = [dict(id=3, name="green"), dict(id=7, name="red")]
    file = folder / "annotations.json"
    file.write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)), "utf-8")
    return file
