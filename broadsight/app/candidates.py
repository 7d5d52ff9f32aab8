"""The models that the page offers: runs, timm names, or if there are none an untrained model that says so."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch

from ..data.loading import Transforms
from ..data.normalising import Normalise
from ..data.scenes import CLASSES
from ..errors import first_line
from ..inspection.macs import executed_macs
from ..runs.classifier import Classifier, open_classifier
from ..runs.dense_model import DenseModel
from ..runs.opening import is_dense, open_run
from ..surgery.pooling import swap_pool
from ..training import recipes
from ..training.run_folder import WEIGHTS, is_run

RUNS = Path("runs")
FOUND = 3  # the newest so many runs that classify, and as many dense ones
MOST_PARAMETERS = 250e6  # of a model that somebody adds in the page: 1 GB
MOST_MACS = 60e9  # likewise: seconds of an image on two cores


@dataclass(frozen=True)
class Candidate:
    """A model of the page. It has a classifier, or else it is a dense run.

    Args:
        name: What the page calls it; no two have the same.
        source: A run folder or a timm name.
        trained: Whether its weights have learned anything.
    """

    name: str
    source: str
    trained: bool
    classifier: Classifier | None = None
    run: DenseModel | None = None

    @property
    def task(self) -> str:
        return "classify" if self.run is None else self.run.task

    @property
    def parameters(self) -> int:
        return self._opened.parameters

    @property
    def device(self) -> torch.device:
        return self._opened.device

    @property
    def _opened(self) -> Any:
        return self.classifier or self.run


class Candidates:
    """All models of the page, shared by everybody who looks at it.

    Only one of them computes at a time, under `computing`: a single model takes all threads anyway, a time that is
    measured is then its own, and what is captured inside a model belongs to the one image that passes.

    Args:
        given: At least one, the first being the page's first choice.
        notes: What was left out, and why.
        device: Where models compute that are added later.
    """

    def __init__(self, given: Sequence[Candidate], notes: Sequence[str] = (), device: str = "auto"):
        self.given = {one.name: one for one in _distinct(given)}
        self.notes, self.device = tuple(notes), device
        self.computing = threading.RLock()
        self._added: OrderedDict[str, Candidate] = OrderedDict()

    @property
    def names(self) -> list[str]:
        return list(self.given)

    @property
    def classifiers(self) -> list[str]:
        return [name for name, one in self.given.items() if one.classifier is not None]

    @property
    def untrained(self) -> list[str]:
        return [name for name, one in self.given.items() if not one.trained]

    def of(self, name: Any) -> Candidate:
        """The model of this name; a ValueError for whatever else somebody has sent."""
        if not isinstance(name, str) or name not in self.given:
            raise ValueError(f"no model here is called {_quoted(name)}; choose from the list")
        return self.given[name]

    def added(self, name: Any) -> Candidate:
        """Make a model of timm's with random weights, for its size and speed. Only names that timm has
        registered: no path, no address, and nothing that would be fetched."""
        if not isinstance(name, str) or name not in registered():
            raise ValueError(f"timm has no model called {_quoted(name)}; choose from the list")
        with self.computing:
            if name not in self._added:
                _refuse_large(name)
                self._added[name] = Candidate(name, name, False, _random(name, self.device))
            self._added.move_to_end(name)
            while len(self._added) > 1 and sum(one.parameters for one in self._added.values()) > MOST_PARAMETERS:
                self._added.popitem(last=False)
            return self._added[name]


def registered() -> frozenset[str]:
    """Names of the models that timm knows, ours among them."""
    return frozenset(timm.list_models())


def open_candidates(
    sources: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    size: int | None = None,
    device: str = "auto",
    runs: Path = RUNS,
) -> Candidates:
    """Open the models that are named, or the newest runs, or an untrained one.

    Args:
        sources: Run folders, of any task, and timm names.
        checkpoint, pretrained, model_args: Of the timm names; see `open_classifier`.
        size: Pixels of a side, instead of those that a model was made for.
        runs: Where runs are looked for if nothing is named.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use cpu or auto")
    options: dict[str, Any] = dict(size=size, device=device)
    if sources:
        timm_names = [source for source in sources if not Path(source).is_dir()]
        if checkpoint and len(timm_names) != 1:
            raise ValueError(f"--checkpoint with {len(timm_names)} timm names; expected exactly one")
        options |= dict(checkpoint=checkpoint, pretrained=pretrained, model_args=model_args)
        return Candidates([_open(source, **options) for source in dict.fromkeys(sources)], device=device)
    if checkpoint or model_args:
        raise ValueError("--checkpoint and --model-args are for a timm name; name one")
    found, notes = [], []
    for path in newest_runs(runs):
        try:
            found.append(_open(str(path), **options))
        except Exception as error:  # an unfinished run must not keep the others from the page
            notes.append(f"left out {path}: {first_line(error)}")
    return Candidates(found or [untrained(device, size)], notes, device)


def newest_runs(folder: Path, most: int = FOUND) -> list[Path]:
    """The newest runs of a folder that have weights, and their twins: so many that classify, and so many dense ones."""
    if not folder.is_dir():
        return []
    places = [path for path in (*folder.glob("*"), *folder.glob("*/twin-*")) if is_run(path)]
    places = [path for path in places if (path / WEIGHTS).is_file()]
    places.sort(key=lambda path: (-(path / WEIGHTS).stat().st_mtime, str(path)))
    kept: dict[bool, list[Path]] = {True: [], False: []}
    for path in places:
        try:
            kept[not is_dense(path)].append(path)
        except ValueError:  # a damaged description
            continue
    return [*kept[True][:most], *kept[False][:most]]


def untrained(device: str = "auto", size: int | None = None) -> Candidate:
    """The model that `broadsight train` would train on the scenes, as it is before that."""
    entry = recipes.find("scenes")
    place = torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = swap_pool(
            str(entry.model), str(entry.pool), num_classes=len(CLASSES), **entry.model_args, **entry.pool_args
        )
    transforms = Transforms(size or entry.recipe.image_size or 96, crop_pct=1.0)
    classifier = Classifier(
        title=f"{entry.model}-{entry.pool}",
        source="random weights",
        model=model.to(place).eval().requires_grad_(False),
        transforms=transforms,
        labels=CLASSES,
        normalise=Normalise(transforms.mean, transforms.std, place),
        run={},
    )
    return Candidate(f"{classifier.title} (untrained)", classifier.source, False, classifier)


def _open(source: str, *, size: int | None, device: str, **of_timm: Any) -> Candidate:
    """Open a run folder or, with the options of `open_classifier`, a timm name."""
    folder = Path(source).is_dir()
    run = open_run(source, size=size, device=device, **({} if folder else of_timm))
    if isinstance(run, DenseModel):
        return Candidate(run.title, source, True, run=run)
    trained = folder or bool(of_timm["checkpoint"]) or of_timm["pretrained"]
    return Candidate(run.title if trained else f"{run.title} (untrained)", source, trained, run)


def _distinct(given: Sequence[Candidate]) -> list[Candidate]:
    """Add to a name that several share the name of their folder, and if need be a number."""
    counts = [one.name for one in given]
    found: list[Candidate] = []
    for one in given:
        name = one.name if counts.count(one.name) == 1 else f"{one.name} ({Path(one.source).absolute().name})"
        taken, plain, number = {other.name for other in found}, name, 2
        while name in taken:
            name, number = f"{plain} {number}", number + 1
        found.append(replace(one, name=name))
    return found


def _refuse_large(name: str) -> None:
    try:
        with torch.device("meta"):
            model: Any = timm.create_model(name)
        channels, height, width = model.pretrained_cfg["input_size"]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        macs = executed_macs(model, (height, width), channels) if parameters <= MOST_PARAMETERS else 0
    except Exception as error:
        raise ValueError(f"{name} cannot be made here: {first_line(error)}") from None
    if parameters > MOST_PARAMETERS or macs > MOST_MACS:
        what = f"{parameters / 1e6:.0f} M parameters" if parameters > MOST_PARAMETERS else f"{macs / 1e9:.0f} G MACs"
        raise ValueError(f"{name} has {what}, too much for this page; time it by: broadsight bench {name}")


def _random(name: str, device: str) -> Classifier:
    try:
        return open_classifier(name, pretrained=False, device=device)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{name} cannot be made here: {first_line(error)}") from None


def _quoted(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= 60 else text[:57] + "..."
