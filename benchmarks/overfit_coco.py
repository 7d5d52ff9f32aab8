"""Whether every kind of dense model can learn real images by heart: a handful of COCO's, near-perfect figures.

    python benchmarks/overfit_coco.py --coco DIR --keypoints DIR --semantic DIR [--only NAME...]
        [--out runs/overfit_coco] [--threads 1] [--json results/overfit_coco.json]

DIR are folders as `broadsight train` takes them: a COCO file of instances with its images, one of person keypoints,
and a pair of images and masks. A few images of each with large objects are copied into --out, and each model is
trained on them, and judged on the same, through `broadsight train`: from random weights, without augmentation. That
shows that data, model, losses, decoding and figures fit together on real images; it says nothing of unseen ones.

For unseen images, --scenes trains a detector on the built-in scenes for a short time, and beside its figures on
scenes that it never saw has those of the same detector untrained.

Run again, it repeats nothing that was finished.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import broadsight  # noqa: F401
from broadsight.benchmark.run import write_json
from broadsight.data.sources.coco import CocoDataset
from broadsight.data.sources.mask_folders import MaskFolder
from broadsight.provenance import commit, versions
from broadsight.training.request import Request
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder, is_run

MODEL = "emsnet_xxtiny"
PLAIN: dict[str, Any] = dict(
    hflip=0.0, color_jitter=0.0, resize=[1.0, 1.0], crop="none", fit_batch=False, warmup_epochs=1, weight_decay=0.0
)
# Half as wide as usual, with fewer proposals: for two cores.
FEW: dict[str, Any] = dict(
    width=128,
    hidden=256,
    rpn_pre_nms_top_n_train=500,
    rpn_post_nms_top_n_train=200,
    rpn_pre_nms_top_n_test=300,
    rpn_post_nms_top_n_test=100,
    box_batch_size_per_image=64,
    box_detections_per_img=30,
)
# The five kinds of dense tasks. `figure` is what should come near 100. Every update sees all images: what BatchNorm
# counts of a few images at a time is not what evaluation uses.
STUDIES: dict[str, dict[str, Any]] = {
    "detect": dict(
        task="detect",
        head="retinanet",
        head_args=dict(width=128, assigner="atss"),
        data="coco",
        figure="box_ap50",
        changes=dict(image_size=192, batch_size=6, lr=2e-3, epochs=4, epoch_updates=40),
    ),
    "instances": dict(
        task="instances",
        head="mask_rcnn",
        head_args=FEW,
        data="coco",
        figure="mask_ap50",
        changes=dict(image_size=160, batch_size=6, lr=1e-3, epochs=4, epoch_updates=40),
    ),
    "segment": dict(
        task="segment",
        head="semantic_fpn",
        head_args=dict(dropout=0.0, pyramid_channels=128, channels=64),
        data="semantic",
        figure="miou",
        changes=dict(image_size=384, batch_size=6, lr=3e-3, epochs=3, epoch_updates=75),
    ),
    "keypoints": dict(
        task="keypoints",
        head="keypoint_rcnn",
        head_args={**FEW, "keypoint_layers": [128] * 4},
        data="keypoints",
        figure="keypoint_ap50",
        changes=dict(image_size=224, batch_size=4, lr=1e-3, epochs=4, epoch_updates=40),
    ),
    "pose": dict(
        task="keypoints",
        head="simple_baseline",
        data="keypoints",
        figure="keypoint_ap50",
        changes=dict(image_size=256, batch_size=6, lr=2e-3, epochs=2, epoch_updates=40, rotation=0.0),
    ),
}
SCENES: dict[str, Any] = dict(image_size=96, batch_size=16, epochs=8, lr=3e-3)
SCENE_COUNT = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coco", metavar="DIR", help="instances of COCO")
    parser.add_argument("--keypoints", metavar="DIR", help="person keypoints of COCO")
    parser.add_argument("--semantic", metavar="DIR", help="images and masks")
    parser.add_argument("--images", type=int, default=6, help="of each")
    parser.add_argument("--only", nargs="*", default=[], choices=[*STUDIES, "scenes"])
    parser.add_argument("--out", default="runs/overfit_coco", metavar="DIR")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", default="results/overfit_coco.json", metavar="FILE")
    given = parser.parse_args()
    out, wanted = Path(given.out), given.only or [*STUDIES, "scenes"]
    places = {"coco": given.coco, "keypoints": given.keypoints, "semantic": given.semantic}
    file = Path(given.json)
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    record |= dict(model=MODEL, threads=given.threads, versions=versions(), commit=commit())
    rows = record.setdefault("rows", {})
    for name in wanted:
        if name == "scenes":
            rows[name] = on_scenes(out, given.threads)
        else:
            study = STUDIES[name]
            place = places[study["data"]]
            if place is None:
                print(f"{name}: not run, since --{study['data']} is not given")
                continue
            rows[name] = by_heart(name, study, Path(place), out, given.images, given.threads)
        print(name, json.dumps(rows[name]["figures"]))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, str(file))


def by_heart(name: str, study: dict[str, Any], place: Path, out: Path, images: int, threads: int) -> dict[str, Any]:
    """Train on a handful of images and judge on the same."""
    data = out / f"data-{study['data']}"
    if not data.is_dir():
        {"coco": few_of_coco, "keypoints": few_of_coco, "semantic": few_of_masks}[study["data"]](place, data, images)
    given = data if study["data"] == "semantic" else data / "annotations.json"
    request = Request(
        data=str(given),
        val=str(given),
        task=study["task"],
        head=study["head"],
        head_args=study.get("head_args", {}),
        model=MODEL,
        changes={**PLAIN, **study["changes"]},
        out=str(out / name),
        threads=threads,
    )
    return run_of(request, study["figure"])


def run_of(request: Request, figure: str) -> dict[str, Any]:
    folder = Path(str(request.out))
    finished = is_run(folder) and (folder / "report.html").is_file()
    started = time.monotonic()
    if not finished:
        train(request, resume=is_run(folder), plain=True)
        (folder / "minutes.json").write_text(json.dumps((time.monotonic() - started) / 60), encoding="utf-8")
    run = RunFolder(folder)
    about = run.config()["broadsight"]
    epochs = [line for line in run.metrics() if line["kind"] == "epoch"]
    last = {key.removeprefix("val_"): value for key, value in epochs[-1].items() if key.startswith("val_")}
    return dict(
        head=request.head,
        task=request.task,
        figure=figure,
        figures=last,
        images=about["data"]["counts"]["train"],
        objects=about["data"].get("objects", {}).get("train"),
        updates=epochs[-1]["updates"],
        batch=about["recipe"]["batch_size"],
        pixels=about["recipe"]["image_size"],
        parameters=about["parameters"],
        minutes=json.loads((folder / "minutes.json").read_text(encoding="utf-8")),
    )


def on_scenes(out: Path, threads: int) -> dict[str, Any]:
    """A detector on scenes that it never saw, after a short training, and beside that the same one untrained."""
    common: dict[str, Any] = dict(data=f"scenes:{SCENE_COUNT}", task="detect", head="retinanet", model=MODEL)
    common["head_args"] = dict(width=128, assigner="atss")
    row = run_of(Request(**common, set=SCENES, out=str(out / "scenes"), threads=threads), "box_ap50")
    still = {**SCENES, "epochs": 1, "epoch_updates": 1, "lr": 1e-12, "min_lr": 0.0, "warmup_epochs": 0}
    untrained = Request(**common, set=still, out=str(out / "scenes-untrained"), threads=threads)
    row["untrained"] = run_of(untrained, "box_ap50")["figures"]
    return row


def few_of_coco(place: Path, target: Path, count: int) -> None:
    """Copy images of which the smallest object is largest, with their annotations."""
    files = [place] if place.is_file() else sorted(place.glob("*.json"))
    content = json.loads(files[0].read_text(encoding="utf-8"))
    images = CocoDataset(files[0], masks=False).images
    areas: dict[int, list[float]] = {image["id"]: [] for image in content["images"]}
    sizes = {image["id"]: image["width"] * image["height"] for image in content["images"]}
    for one in content["annotations"]:
        crowd = one.get("iscrowd") or ("num_keypoints" in one and not one["num_keypoints"])
        areas[one["image_id"]].append(0.0 if crowd else one["area"] / sizes[one["image_id"]])
    ranked = sorted((number for number in areas if areas[number]), key=lambda number: -min(areas[number]))
    chosen = set(ranked[:count])
    part = {**content, "images": [image for image in content["images"] if image["id"] in chosen]}
    part["annotations"] = [one for one in content["annotations"] if one["image_id"] in chosen]
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "images").mkdir(parents=True)
    for image in part["images"]:
        shutil.copy(images / image["file_name"], unfinished / "images" / Path(image["file_name"]).name)
        image["file_name"] = Path(image["file_name"]).name
    (unfinished / "annotations.json").write_text(json.dumps(part), encoding="utf-8")
    unfinished.rename(target)


def few_of_masks(place: Path, target: Path, count: int) -> None:
    """Copy images of which the smallest class is largest, with masks and names of the classes that are in them."""
    folder = MaskFolder(place / "images", place / "masks")
    shares = []
    for index in range(len(folder)):
        classes = folder.target(index)
        found, counts = classes[classes != folder.ignore].unique(return_counts=True)
        shares.append(float(counts.min()) / classes.numel() if len(found) > 1 else 0.0)  # one class is too easy
    chosen = sorted(range(len(folder)), key=lambda index: -shares[index])[:count]
    masks = {index: folder.target(index) for index in chosen}
    # All of COCO's classes would cost most of the time, and none but these can occur.
    kept = sorted({int(value) for mask in masks.values() for value in mask.unique()} - {folder.ignore})
    number = torch.full((256,), folder.ignore or 255)
    number[kept] = torch.arange(len(kept))
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for kind in ("images", "masks"):
        (unfinished / kind).mkdir(parents=True)
    for index, mask in masks.items():
        image = folder.images / folder.name(index)
        shutil.copy(image, unfinished / "images" / image.name)
        Image.fromarray(number[mask].byte().numpy()).save(unfinished / "masks" / f"{image.stem}.png")
    names = [folder.classes[value] for value in kept]
    (unfinished / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    unfinished.rename(target)


if __name__ == "__main__":
    main()
