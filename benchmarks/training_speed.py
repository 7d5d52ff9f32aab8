"""What the engine costs beside a bare loop, and how fast the data pipeline is beside timm's own loader.

    python benchmarks/training_speed.py [--rounds 30] [--folder DIR] [--workers 1] [--json results/training_speed.json]

A step: the same weights and the same images in memory, one thread, process CPU time, interleaved. The bare loop does
what it must: forward, loss, backward, optimiser. The engine does so too, and seeds, normalises, counts, checks, steps
the schedule and reports progress.

Data: the same folder, transforms, batch, workers; both loaders run over it in turns, and the median ratio of images a
second is printed: of CPU time without workers, of real time with them. Without --folder, 400 drawn scenes are written
as JPEG files of 320 pixels first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageDataset, create_loader

import broadsight.models  # noqa: F401  registers the models
from broadsight.benchmark.run import fixed_threads, interleave, median_interval, write_json
from broadsight.data.loading import Batch, SourceDataset, TrainOrder, Transforms, load
from broadsight.data.scenes import Scenes
from broadsight.data.sources import resolve
from broadsight.provenance import commit, versions
from broadsight.training import processes
from broadsight.training.request import Request
from broadsight.training.run import prepare
from broadsight.training.settings import settings_of

STEPS = (("emsnet_xxtiny", 64, 32), ("resnet18", 64, 32), ("resnet18", 224, 8), ("vit_tiny_patch16_224", 224, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each")
    parser.add_argument("--passes", type=int, default=5, help="passes of each loader over the folder")
    parser.add_argument("--folder", help="folder of class folders")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    record: dict[str, Any] = {"versions": versions(), "commit": commit(), "steps": [], "data": []}
    with fixed_threads(1), tempfile.TemporaryDirectory() as scratch:
        for name, size, batch in STEPS:
            row = {
                "model": name,
                "size": size,
                "batch": batch,
                **compare_steps(name, size, batch, args.rounds, scratch),
            }
            record["steps"].append(row)
            print(f"step  {name:22} {size} px, batch {batch:3}: engine / bare loop {_ratio(row)}", flush=True)
        folder = Path(args.folder or _write_scenes(Path(scratch)))
        for augment in ("", "rand-m5-inc1"):  # a stronger one crashes timm with Pillow 13
            for workers in (0, args.workers):
                row = {"augment": augment, "workers": workers, **compare_loaders(folder, augment, workers, args.passes)}
                record["data"].append(row)
                what = f"data  {augment or 'crops and flips':16} workers {workers}"
                print(f"{what} {row['images_a_second']}: ours / timm {_ratio(row)}", flush=True)
    if args.json:
        write_json(record, args.json)


def compare_steps(name: str, size: int, batch: int, rounds: int, scratch: str) -> dict[str, Any]:
    """Median of the ratio of the engine's time for a step to a bare loop's, and where it lies."""
    changes = dict(image_size=size, batch_size=batch, epochs=1, warmup_epochs=0, clip_norm=None, smoothing=0)
    request = Request(
        data=f"scenes:{2 * batch}", model=name, changes=changes, workers=0, threads=1, out=f"{scratch}/{name}-{size}"
    )
    settings, recipe = settings_of(request, None)
    engine = prepare(request, settings, recipe, processes.connect("cpu")).engine
    engine.plain.train()
    engine.work.begin_epoch(0, 0)
    batches: Batch = engine.work.next_batch()
    torch.manual_seed(0)
    model: Any = timm.create_model(name, num_classes=10, **settings["model_args"], **_sized(name, size)).train()
    model.load_state_dict(engine.plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = engine.work._normalised(batches.images), batches.labels

    def bare() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        engine._update([batches])
        engine._since_check.clear()

    return _alternate({"ours": ours, "theirs": bare}, rounds, time.process_time)


def compare_loaders(
    folder: Path, augment: str, workers: int, passes: int, size: int = 224, batch: int = 32
) -> dict[str, Any]:
    """Median of the ratio of images a second, ours to timm's, over whole passes by turns."""
    splits = resolve(str(folder), split=0.01)
    options: dict[str, Any] = dict(scale=(0.08, 1.0), hflip=0.5, color_jitter=0.4, auto_augment=augment or None)
    transforms = Transforms(size, augmentation=options)
    order = TrainOrder(splits.train, batch)
    ours = load(SourceDataset(splits.train, transforms.build(True), training=True), order, workers=workers)
    dataset = ImageDataset(str(folder))
    device = torch.device("cpu")
    theirs = create_loader(
        dataset,
        (3, size, size),
        batch,
        is_training=True,
        interpolation="bicubic",
        num_workers=workers,
        device=device,
        pin_memory=False,
        **options,
    )
    mean = torch.tensor([255 * value for value in transforms.mean]).view(1, 3, 1, 1)
    scale = torch.tensor([1 / (255 * value) for value in transforms.std]).view(1, 3, 1, 1)

    def normalised() -> Iterator[torch.Tensor]:
        for images, *_ in ours:
            yield (images - mean).mul_(scale)

    clock = time.perf_counter if workers else time.process_time  # which sees this process alone

    def run(batches: Any) -> float:
        start, seen = clock(), 0
        for images in batches:
            seen += len(images)
        return seen / (clock() - start)

    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(passes + 1):
        order.start(number)
        found = {"ours": run(normalised()), "theirs": run(images for images, _ in theirs)}
        if number:  # the first one starts the workers
            for key, value in found.items():
                speeds[key].append(value)
    rates = {key: round(statistics.median(values), 1) for key, values in speeds.items()}
    return {"images_a_second": rates, **_ratios(speeds)}


def _alternate(candidates: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    def timed(call: Callable[[], None], _: int) -> float:
        start = clock()
        call()
        return clock() - start

    samples = interleave(list(candidates.values()), timed, rounds + 2)
    times = {key: taken[2:] for key, taken in zip(candidates, samples, strict=True)}  # two rounds warm up
    return {"ms": {key: round(1e3 * statistics.median(taken), 2) for key, taken in times.items()}, **_ratios(times)}


def _ratios(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Median and interval of ours over theirs, within rounds."""
    ratios = [ours / theirs for ours, theirs in zip(*samples.values(), strict=True)]
    low, high = median_interval(ratios)
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "rounds": len(ratios)}


def _sized(name: str, size: int) -> dict[str, int]:
    return {"img_size": size} if name.startswith("vit") else {}


def _write_scenes(folder: Path, count: int = 400, size: int = 320) -> Path:
    scenes = Scenes(count, size=size)
    for index in range(count):
        place = folder / "scenes" / scenes.classes[scenes.label(index)]
        place.mkdir(parents=True, exist_ok=True)
        scenes.open(index).save(place / f"{index}.jpg", quality=90)
    return folder / "scenes"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


if __name__ == "__main__":
    main()
