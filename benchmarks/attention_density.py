"""Does context broadcasting change how dense attention is? Trains small ViTs with and without it, and measures both.

    python benchmarks/attention_density.py TRAIN.tar.gz VAL.tar.gz [--seeds 2] [--passes 6] [--json FILE] [--plot FILE]

The tar files hold one folder of images for each class. Everything but the broadcasting is the same: a ViT with patches
of 4 for images of 32x32 (6 blocks, 96 channels, 3 heads), AdamW, cosine schedule with warm-up, random flips and shifts.
Reported are the accuracy and the mean entropy of attention rows in every layer on the validation images, by seed.
"""

import argparse
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import broadsight
from broadsight.analysis import LayerEntropy, attention_entropy, plot_attention_entropy

KINDS = ("none", "cb", "scaled")
VIT: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=96, depth=6, num_heads=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", metavar="TRAIN")
    parser.add_argument("val", metavar="VAL")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated: none, cb, scaled, gate, hybrid")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=6, help="over the training images")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train, val = read(args.train), read(args.val)
    runs: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for kind in args.kinds.split(","):
            started = time.perf_counter()
            model = build(kind, seed, int(train[1].max()) + 1)
            learn(model, *train, passes=args.passes, seed=seed)
            entropy = attention_entropy(model, val[0][:1000], batch_size=100)
            run = dict(
                kind=kind,
                seed=seed,
                top1=accuracy(model, *val),
                entropy={name: float(layer) for name, layer in entropy.items()},
                keys=[layer.keys for layer in entropy.values()],
                minutes=(time.perf_counter() - started) / 60,
            )
            runs.append(run)
            print(json.dumps(run), flush=True)
            record = dict(vit=VIT, images=len(train[0]), passes=args.passes, threads=args.threads, runs=runs)
            if args.json:
                Path(args.json).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
            if args.plot:
                draw(runs, args.plot)


def draw(runs: list[dict[str, Any]], path: str) -> None:
    """The first seed's models, from what was recorded of them."""
    lines = {}
    for run in (run for run in runs if run["seed"] == 0):
        layers = zip(run["entropy"].items(), run["keys"], strict=True)
        label = "ViT" if run["kind"] == "none" else f"ViT + {run['kind']}"
        lines[label] = {name: LayerEntropy(value, (value,), keys) for (name, value), keys in layers}
    plot_attention_entropy(lines, path)


def read(path: str) -> tuple[Tensor, Tensor]:
    """All images of a tar of class folders as (N, 3, 32, 32) in [-1, 1], and their labels."""
    photos: list[np.ndarray] = []
    classes: list[str] = []
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and Path(member.name).suffix.lower() in (".png", ".jpg", ".jpeg"):
                photos.append(np.asarray(Image.open(file).convert("RGB").resize((32, 32))))
                classes.append(Path(member.name).parent.name)
    if not photos:
        raise SystemExit(f"{path} holds no images; expected a tar with one folder of images for each class")
    names = sorted(set(classes))
    images = torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images.contiguous(), torch.tensor([names.index(name) for name in classes])


def build(kind: str, seed: int, classes: int) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **VIT)
    return model if kind == "none" else broadsight.add_context_broadcast(model, kind)


def learn(model: nn.Module, images: Tensor, labels: Tensor, passes: int, seed: int, batch: int = 128) -> None:
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=1e-3)
    steps = passes * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    torch.manual_seed(seed)
    for _ in range(passes):
        order = torch.randperm(len(images))
        for chosen in order[: len(order) // batch * batch].split(batch):
            loss = F.cross_entropy(model.train()(augment(images[chosen])), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()


def augment(images: Tensor, shift: int = 4) -> Tensor:
    """Mirrored or not, and moved by a few pixels, the whole batch alike."""
    if torch.rand(()) < 0.5:
        images = images.flip(-1)
    down, right = torch.randint(0, 2 * shift + 1, (2,)).tolist()
    return F.pad(images, [shift] * 4)[..., down : down + 32, right : right + 32]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of the images that get their own label."""
    right = sum(
        (model.eval()(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return 100 * float(right) / len(images)


if __name__ == "__main__":
    main()
