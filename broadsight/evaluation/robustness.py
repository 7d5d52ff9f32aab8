"""How a classifier stands what is done to its images: occlusion, an attack, removal by saliency, corruptions."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..data.corruptions import CORRUPTIONS, GROUPS, SEVERITIES, corrupt
from ..data.loading import Batch, EvalOrder, SourceDataset, Transforms, close, load
from ..data.seeds import mixed
from ..data.sources import Source
from ..data.view import View, labels_of
from ..inspection.meta_pass import in_eval_mode
from .predictions import Subject, answers, restricted
from .saliency import Saliency, about

GRID = 14  # squares along the shorter side that go at random, as many as DINO's patches
Cases = list[tuple[str, float]]  # case, at
Asked = Iterable[tuple[str, float, Tensor]]  # case, at, logits (B, C)
Ask = Callable[[Tensor], Tensor]  # normalised images -> logits
SUITES = ("occlusion", "fgsm", "salient", "corruptions")
ORDERS = ("salient first", "random", "least salient first")  # in which pixels go
HALF = 0.5  # of a side: the occlusion that stands for the others
EIGHT = 8.0  # of 255: likewise the attack
# Title of each suite, its settings in a sentence or two, and what `at` means.
WORDS = {
    "occlusion": (
        "Occlusion of the centre",
        "A centred square is set to the mean colour (0 after normalisation). Half the side, a quarter of the area, "
        "is our reading of the papers' centre occlusion, whose size is not printed.",
        "side of the square, as a fraction of the image's",
    ),
    "fgsm": (
        "Fast gradient sign attack",
        "One step along the signs of the gradient of the true class's cross-entropy, clipped to valid pixel values "
        "and not rounded to bytes. 8/255 is our reading of the papers' FGSM, whose step is not printed.",
        "step, in 255ths",
    ),
    "salient": (
        "Removal of salient pixels",
        "Pixels are set to the mean colour (0 after normalisation), first those that are salient by {saliency}; "
        "and for comparison square after square at random, and in the opposite order. An area is the mean height "
        "of a curve.",
        "fraction of the pixels removed",
    ),
    "corruptions": (
        "Common corruptions",
        "Images are resized and cropped, then corrupted: {kinds} of {all} kinds at severity {severities}. These are "
        "the kinds of ImageNet-C in our own drawing, so figures do not compare with those of its published images; "
        "there is no mCE, which needs the errors of an AlexNet.",
        "severity",
    ),
}


@dataclass(frozen=True)
class Choices:
    """How hard the suites are. Images as they are, at 0, are always measured too."""

    corruptions: Sequence[str] = CORRUPTIONS
    severities: Sequence[int] = SEVERITIES
    epsilons: Sequence[float] = (1.0, 4.0, 8.0)  # steps of the attack, in units of pixels between 0 and 255
    sides: Sequence[float] = (0.25, 0.5, 0.75)  # of the square that occludes, as fractions of the image's side
    fractions: Sequence[float] = tuple(tenth / 10 for tenth in range(10))  # parts of the pixels that are removed

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not len(values):
                raise ValueError(f"{name} are empty; expected one or more")
            highest = dict(sides=1, epsilons=255, fractions=1).get(name)
            if highest and (wrong := [value for value in values if not 0 <= value <= highest]):
                raise ValueError(f"{wrong[0]} among {name}; expected numbers between 0 and {highest}")
        if unknown := [name for name in self.corruptions if name not in CORRUPTIONS]:
            raise ValueError(f"unknown corruption {unknown[0]!r}; corruptions are {', '.join(CORRUPTIONS)}")
        if wrong := [severity for severity in self.severities if severity not in SEVERITIES]:
            raise ValueError(f"severity {wrong[0]}; expected some of {', '.join(map(str, SEVERITIES))}")

    def cases(self, suite: str) -> list[tuple[str, float]]:
        """What a suite measures: case and at, in the order of its rows."""
        if suite not in SUITES:
            raise ValueError(f"unknown suite {suite!r}; suites are {', '.join(SUITES)}")
        if suite == "corruptions":
            names, severities = [x for x in CORRUPTIONS if x in self.corruptions], sorted(set(self.severities))
            return [("clean", 0.0), *((name, float(severity)) for name in names for severity in severities)]
        steps = {"occlusion": self.sides, "fgsm": self.epsilons, "salient": self.fractions}[suite]
        cases = {"occlusion": ("centre",), "fgsm": ("fgsm",), "salient": ORDERS}[suite]
        return [(case, at) for case in cases for at in sorted({0.0, *map(float, steps)})]

    def described(self, suite: str, saliency: str) -> tuple[str, str, str]:
        """WORDS of a suite with these choices, and what pixels are removed by in words."""
        title, about, axis = WORDS[suite]
        severities = ", ".join(map(str, sorted(set(self.severities))))
        counts = dict(kinds=len(set(self.corruptions)), all=len(CORRUPTIONS))
        return title, about.format(saliency=saliency, severities=severities, **counts), axis


class Corrupted(View):
    """Images, resized and cropped for the model, then corrupted; each by its index and the seed alone.

    No further geometry must follow: `as_bytes` is the transform to load these with.
    """

    def __init__(self, source: Source, transforms: Transforms, name: str, severity: int, seed: int = 0):
        super().__init__(source)
        self.geometry = transforms.build(False)
        self.corruption, self.severity, self.seed = name, severity, seed

    def open(self, index: int) -> Image.Image:
        pixels = torch.as_tensor(self.geometry(super().open(index))).permute(1, 2, 0).numpy()  # H W C
        found = corrupt(pixels, self.corruption, self.severity, seed=mixed(self.seed, index))
        return Image.fromarray(found[..., 0] if found.shape[2] == 1 else found)


def as_bytes(image: Image.Image) -> Tensor:
    """(C, H, W) of bytes."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


class Tested(Subject, Protocol):
    """What a suite is run on; its `normalise` takes numbers between 0 and 255 as well as bytes."""

    @property
    def transforms(self) -> Transforms: ...


@dataclass(frozen=True)
class Row:
    """Top-1 in per cent of `images` images, in one case."""

    case: str
    at: float
    top1: float
    images: int


@dataclass(frozen=True)
class Suite:
    """What came of a suite."""

    name: str
    title: str
    about: str  # its settings, in a sentence or two
    axis: str  # what `at` means
    rows: tuple[Row, ...]
    summary: dict[str, Any]  # figures in per cent, by name; None where there is nothing to compare with
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why

    def curve(self, case: str) -> list[tuple[float, float]]:
        """(at, top-1) of one case."""
        return [(row.at, row.top1) for row in self.rows if row.case == case]


def run_suite(
    name: str,
    classifier: Tested,
    source: Source,
    *,
    choices: Choices | None = None,
    saliency: Saliency | None = None,
    batch: int = 64,
    workers: int = 0,
    kept: np.ndarray | None = None,
    seed: int = 0,
    strict: bool = False,
    seen: Callable[[int, str], None] = lambda count, doing: None,
) -> Suite:
    """Ask about every image in every case of one of SUITES, among the classes that are `kept`, or all.

    `seed` is that of ties in saliency, of the random order and of corruptions; `seen` is told how many images more are
    done, and in which case.
    """
    choices = choices or Choices()
    cases = choices.cases(name)
    if not len(source):
        raise ValueError("there are no images to try the model on")
    labels, classes = labels_of(source), classifier.num_classes
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels go from {labels.min()} to {labels.max()}, but the model has {classes} classes")
    if kept is not None and not np.isin(labels, kept).all():
        raise ValueError("some images show classes that do not compete; leave them out")
    if batch < 1:
        raise ValueError(f"batch={batch}; expected 1 or more")

    def ask(images: Tensor) -> Tensor:
        return restricted(classifier.logits(images), kept)

    right, images = dict.fromkeys(cases, 0), dict.fromkeys(cases, 0)
    skipped: dict[str, str] = {}
    with _evaluating(getattr(classifier, "model", classifier)):
        for part, transform, asked in _rounds(name, cases, classifier, ask, source, saliency, seed):
            for found in _batches(SourceDataset(part, transform, strict=strict), batch, workers):
                skipped.update(found.skipped)
                if not len(found.labels):
                    continue
                for case, at, logits in asked(classifier.normalise(found.images), found):
                    right[case, at] += int((answers(logits, found.labels)["ranks"] == 0).sum())
                    images[case, at] += len(found.labels)
                    seen(len(found.labels), f"{case} {at:g}" if at else "clean")
    if not all(images.values()):
        raise RuntimeError(f"none of the {len(source)} images can be read; see what is wrong with them")
    rows = tuple(Row(*case, 100 * right[case] / images[case], images[case]) for case in cases)
    words = choices.described(name, about(saliency) if saliency else "")
    return Suite(name, *words, rows, summary_of(name, rows), skipped)


def summary_of(name: str, rows: Sequence[Row]) -> dict[str, float | None]:
    """A few figures of a suite; None for a share of nothing."""
    clean = next(row.top1 for row in rows if not row.at)
    summary: dict[str, float | None] = {"clean": clean}
    if name in ("occlusion", "fgsm"):
        key, stands = ("half the side", HALF) if name == "occlusion" else ("8/255", EIGHT)
        if found := [row.top1 for row in rows if row.at == stands]:
            summary[key] = found[0]
    elif name == "salient":
        curves = {order: [row for row in rows if row.case == order] for order in ORDERS}
        areas = {order: area([row.at for row in r], [row.top1 for row in r]) for order, r in curves.items()}
        summary |= {f"area, {order}": value for order, value in areas.items()}
        summary["gap to random"] = areas["random"] - areas["salient first"]
        summary["gap to least salient"] = areas["least salient first"] - areas["salient first"]
    else:
        harmed = [row for row in rows if row.at]
        summary["mean"] = mean = float(np.mean([row.top1 for row in harmed]))
        groups = {group: [row.top1 for row in harmed if row.case in names] for group, names in GROUPS.items()}
        summary |= {group: float(np.mean(found)) for group, found in groups.items() if found}
        summary["mean, of clean"] = 100 * mean / clean if clean else None
    return summary


def occluded(images: Tensor, side: float) -> Tensor:
    """Images (B, C, H, W) with a centred square, round(side * H) by round(side * W) pixels, of 0, the mean colour."""
    rows, columns = (slice((n - round(side * n)) // 2, (n + round(side * n)) // 2) for n in images.shape[-2:])
    out = images.clone()
    out[..., rows, columns] = 0
    return out


def direction(ask: Ask, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Signs (B, C, H, W) of the gradient of the cross-entropy by the images, or by pixels; and the logits (B, C)."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        logits = ask(images)
        # In double precision: that of a sure answer would often be no gradient at all, and the attack none
        loss = F.cross_entropy(logits.cpu().double(), labels.cpu(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, images)
    return gradient.sign(), logits.detach()


def stepped(normalise: Callable[[Tensor], Tensor], images: Tensor, signs: Tensor, epsilon: float) -> Tensor:
    """Bytes (B, C, H, W), a step of epsilon of 255 along the signs, as normalised images; 0 to 255, not rounded."""
    return normalise((images.to(signs) + epsilon * signs).clamp(0, 255))


def removal_ranks(saliency: Tensor, indices: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """When each pixel goes, by order: (B, H, W) of numbers from 0, which goes first, to H * W - 1.

    Ties and the random order are drawn for each image by its index and the seed. At random whole squares go, since
    nothing like scattered pixels is in an image.
    """
    pixels = saliency[0].numel()
    generators = [torch.Generator().manual_seed(mixed(seed, index)) for index in indices]
    ties = torch.stack([torch.randperm(pixels, generator=one) for one in generators]).to(saliency.device)  # B N
    height, width = saliency.shape[1:]
    side = max(1, min(height, width) // GRID)
    rows, columns = torch.arange(height) // side, torch.arange(width) // side
    squares = (rows[:, None] * (int(columns[-1]) + 1) + columns).flatten()  # which square each pixel is in
    drawn = [torch.randperm(int(squares.max()) + 1, generator=one)[squares] for one in generators]
    random = torch.stack(drawn).argsort(dim=1, stable=True).argsort(dim=1).to(saliency.device)  # B N
    among = saliency.flatten(1).gather(1, ties).argsort(dim=1, descending=True, stable=True)
    order = ties.gather(1, among)  # pixels, the most salient first
    salient = order.argsort(dim=1)  # the inverse: when each of them goes
    ranks = dict(zip(ORDERS, (salient, random, pixels - 1 - salient), strict=True))
    return {name: rank.view_as(saliency) for name, rank in ranks.items()}


def without(images: Tensor, ranks: Tensor, fraction: float) -> Tensor:
    """Images (B, C, H, W) without the first round(fraction * H * W) pixels: these are 0, the mean colour."""
    return images.masked_fill((ranks < round(fraction * ranks[0].numel()))[:, None], 0)


def checked_saliency(found: Tensor, images: Tensor) -> Tensor:
    """(B, H, W), finite, on the images' device."""
    wanted = (images.shape[0], *images.shape[-2:])
    if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
        came = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"the saliency of images {tuple(images.shape)} is {came}; expected (B, H, W) = {wanted}")
    found = found.detach().to(images.device)
    if not bool(torch.isfinite(found).all()):
        raise ValueError("the saliency holds numbers that are not finite; pixels cannot be ordered by it")
    return found


def area(at: Sequence[float], values: Sequence[float]) -> float:
    """The mean height of a curve, by trapezoids; of a single point its own."""
    steps = [high - low for low, high in pairwise(at)]
    means = [(left + right) / 2 for left, right in pairwise(values)]
    return sum(step * mean for step, mean in zip(steps, means, strict=True)) / sum(steps) if steps else values[0]


def _rounds(
    name: str, cases: Cases, classifier: Tested, ask: Ask, source: Source, saliency: Saliency | None, seed: int
) -> Iterator[tuple[Source, Callable[[Any], Any], Callable[[Tensor, Batch], Asked]]]:
    """What is gone through in turn: images, their transform, and what is asked about each batch."""
    plain = classifier.transforms.build(False)

    def occlusion(images: Tensor, batch: Batch) -> Asked:
        return ((case, at, ask(occluded(images, at))) for case, at in cases)

    def fgsm(images: Tensor, batch: Batch) -> Asked:
        signs, clean = direction(ask, images, batch.labels)
        for case, at in cases:
            yield case, at, ask(stepped(classifier.normalise, batch.images, signs, at)) if at else clean

    def salient(images: Tensor, batch: Batch) -> Asked:
        assert saliency is not None
        found = checked_saliency(saliency(images, batch), images)
        ranks = removal_ranks(found, [index for _, _, index in batch.keys], seed)
        clean = ask(images)
        for order, at in cases:
            yield order, at, ask(without(images, ranks[order], at)) if at else clean

    if name != "corruptions":
        yield source, plain, {"occlusion": occlusion, "fgsm": fgsm, "salient": salient}[name]
        return
    for case, at in cases:
        corrupted = (Corrupted(source, classifier.transforms, case, int(at), seed), as_bytes) if at else (source, plain)
        yield *corrupted, lambda images, _, case=case, at=at: [(case, at, ask(images))]


def _batches(images: SourceDataset, size: int, workers: int) -> Iterator[Batch]:
    loader = load(images, EvalOrder(images.source, size), workers=workers)
    try:
        for batch in loader:
            if batch.failure:
                raise RuntimeError(batch.failure)
            yield batch
    finally:
        close(loader)


@contextmanager
def _evaluating(model: Any) -> Generator[None, None, None]:
    """The model in eval mode, without gradients unless asked for, and afterwards as it was."""
    with in_eval_mode(model) if isinstance(model, nn.Module) else torch.no_grad():
        if isinstance(model, nn.Module):
            # Not in inference mode, and without what models like LeViT keep of a pass in it: no gradient goes through
            model.train()
            model.eval()
        yield
