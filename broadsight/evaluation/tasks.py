"""Which classifiers are asked about which images: opened and checked before any work."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from ..data.contents import contents, same_contents
from ..data.inside import outside_allowed
from ..data.sources import Source, Splits, resolve
from ..data.sources.evaluation import Found, Which, open_part, same_data
from ..data.sources.sample_table import some
from ..data.stratify import METHOD
from ..data.view import View, labels_of, sample
from ..deployment.exported import open_any, refuse_without_gradients
from ..errors import UsageError, refuse_idle, unknown
from ..options import CLASSIFIERS
from ..runs.classifier import Classifier
from ..runs.names import imagenet_names, synsets
from ..runs.opening import facts_of, name_of, with_weights
from ..training.history import check_own_data
from .classification import METRICS
from .imagenet_sets import SETS, ImageNetSet, called_after, find_sets, indices_of, open_set
from .request import NAMED_DATA, Request
from .robustness import SUITES, Choices

ROBUSTNESS = "robustness"  # all suites


def check(request: Request) -> None:
    """Refuse what no images and no models could make right: unknown figures and suites, two sets at once."""
    if wrong := [name for name in request.metrics if name not in METRICS]:
        raise unknown("metric", wrong[0], METRICS)
    known = (*SUITES, ROBUSTNESS, *SETS)
    if wrong := [name for name in request.suite if name not in known]:
        raise UsageError(f"unknown suite {wrong[0]!r}; suites are {', '.join(known)}")
    if len(sets := [name for name in request.suite if name in SETS]) > 1:
        raise UsageError(f"DATA is one set, not {' and '.join(sets)}; give the folder that holds both to have both")
    choices_of(request)


def suites_of(request: Request) -> tuple[str, ...]:
    """The suites of robustness to run, in their order."""
    return tuple(name for name in SUITES if ROBUSTNESS in request.suite or name in request.suite)


def choices_of(request: Request) -> Choices:
    """How hard the suites are."""
    given: dict[str, Any] = dict(sides=request.occluded, epsilons=request.epsilons)
    given |= dict(corruptions=request.corruptions, severities=request.severities)
    return Choices(**{name: value for name, value in given.items() if value})


def facts_of_evaluation(request: Request) -> dict[str, str | None]:
    """What options are for, see `Option.of`: None, or why it does not hold of this evaluation."""
    facts = facts_of(request.run, [one for one in request.beside if "@" not in one])
    dense, asked = facts[CLASSIFIERS], suites_of(request)
    names = {f"--suite {name}": name in asked for name in SUITES}
    names["--saliency dino"] = request.saliency == "dino" and names["--suite salient"]
    facts |= {name: dense or (None if holds else "which is not given") for name, holds in names.items()}
    facts["--samples"] = None if request.samples is not None else "which is not given"
    nothing_named = dense and request.data is None
    return facts | {NAMED_DATA: "a dense run is asked about what it validated on" if nothing_named else None}


@dataclass(frozen=True)
class Task:
    """A classifier and the images it is asked about, labelled as it numbers its classes."""

    classifier: Classifier
    source: Source
    names: tuple[str, ...]  # of the classes
    title: str = ""  # of the images, where DATA holds several sets
    kept: np.ndarray | None = None  # the classes that compete; all if None
    accepted: Mapping[int, Sequence[int]] | None = None  # by image all answers that are right, where several may be


def open_classifiers(request: Request) -> list[Classifier]:
    """The classifier asked for and those beside it, no two with the same title."""
    first = open_any(request)
    opened, channels = {first.title: first}, first.transforms.channels
    for name in request.beside:
        one = open_any(request, name, checkpoint=with_weights(name)[1], model_args=None, light=False)
        numbered = chain([one.title], (f"{one.title} ({number})" for number in count(2)))
        title = next(title for title in numbered if title not in opened)
        opened[title] = replace(one, title=title)
        if one.transforms.channels != channels:
            takes = f"{title} takes {one.transforms.channels} channels, {first.title} {channels}"
            raise ValueError(f"{takes}; side by side they need the same images")
    if "fgsm" in suites_of(request):
        for one in opened.values():
            refuse_without_gradients("--suite fgsm", one)
    return list(opened.values())


def open_tasks(request: Request, classifiers: Sequence[Classifier]) -> tuple[Found, list[list[Task]]]:
    """What was found, and a task for each classifier: once, or for each set in turn where DATA holds several."""
    sets = list(_imagenet_sets(request, classifiers))
    _refuse_ignored(request, sets)
    if sets:
        one = sets[0]
        notes = tuple(dict.fromkeys(note for each in sets for note in each.notes))
        about = dict(kind=one.name, data=request.data, place=str(one.path), images=len(one.source))
        found = Found(one.source, str(one.path), notes, about)
        return found, [[_of_set(each, classifier, request) for classifier in classifiers] for each in sets]
    found = _images(request, classifiers[0])
    tasks, notes = [], list(found.notes)
    for classifier in classifiers:
        places, names, more = match_classes(classifier, found.source, found.place)
        source = sample(View(found.source, classes=names, places=places), request.samples, request.seed or 0)
        tasks.append(Task(classifier, source, names))
        notes += more
        if len(source) < len(found.source):
            notes += _missing(labels_of(source), names, classifier.title, f"the sample of {found.place}")
    return replace(found, notes=tuple(dict.fromkeys(notes))), [tasks]


def _refuse_ignored(request: Request, sets: Sequence[ImageNetSet]) -> None:
    """Refuse options that these images would make nothing of."""
    whole = f"DATA is {sets[0].title}, which is taken whole" if sets else None
    given = {"--part": request.part != "auto", "--split": request.split is not None, "--root": request.root is not None}
    given |= {"--download": request.download, "--real-labels": request.real_labels is not None}
    needs = dict.fromkeys(given, ("other data",)) | {"--real-labels": ("imagenet-real",)}
    real = any(one.accepted is not None for one in sets)
    facts = {"other data": whole, "imagenet-real": None if real else "DATA is something else"}
    refuse_idle({name: name for name, is_given in given.items() if is_given}, needs, facts)


def _images(request: Request, classifier: Classifier) -> Found:
    settings = classifier.run.get("broadsight", {}).get("settings", {})
    own, whole = settings.get("data"), request.split is None and request.part in ("auto", "val", "train")
    if request.data is None and own is None:
        raise ValueError(f"{name_of(request.run)} does not say on what it was trained; give DATA to evaluate it on")
    if own is not None and whole and request.seed is None and (request.data is None or same_data(request.data, own)):
        return found_in(classifier, own_splits(classifier, request.root, request.download, request.data), request.part)
    if request.data is None:
        check_own_data(settings)
    seed = settings.get("seed", 0) if request.seed is None else request.seed
    options = _options(classifier, request.root, request.download)
    return open_part(request.data or own, request.part, split=request.split, seed=seed, **options)


def _options(classifier: Classifier, root: str | None, download: bool) -> dict[str, Any]:
    """What a run says of how its data are opened, and the classifier of its images."""
    run, transforms = classifier.run.get("broadsight", {}), classifier.transforms
    settings, size = run.get("settings", {}), run.get("recipe", {}).get("image_size") or transforms.size
    method = settings.get("hold_out", 1) if settings else METHOD
    options: dict[str, Any] = dict(root=root or settings.get("root"), download=download, method=method)
    return options | dict(channels=transforms.channels, scenes_size=size)


def own_splits(
    classifier: Classifier, root: str | None = None, download: bool = False, given: str | None = None
) -> Splits:
    """The data of a run as it was split for it, hold-out and all; fetched only if the user names it, as `given`."""
    settings = classifier.run["broadsight"]["settings"]
    check_own_data(settings, given)
    options: dict[str, Any] = dict(val=settings.get("val"), split=settings.get("split"), seed=settings["seed"])
    with outside_allowed(settings.get("allow_outside", False)):
        return resolve(settings["data"], **options, **_options(classifier, root, download))


def found_in(classifier: Classifier, splits: Splits, part: Which = "val") -> Found:
    """The part of its own data that a run was validated on, or trained."""
    run = classifier.run["broadsight"]
    which = "train" if part == "train" else "val"
    source, about, notes = getattr(splits, which), splits.description, list(splits.notes)
    stored = run.get("data", {})
    before, found = stored.get("fingerprint"), {"contents": contents({which: source} if "contents" in stored else {})}
    if before and (before != about.get("fingerprint") or not same_contents(stored, found)):
        notes.append(f"the images in {run['settings']['data']} are not those that {classifier.source} was begun with")
    about = {**about, "data": run["settings"]["data"], "part": which, "images": len(source)}
    return Found(source, str(about[which]), tuple(notes), about)


def match_classes(
    classifier: Classifier, source: Source, place: str
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """For each class of a source its number among the classifier's, -1 for those without images that it does not know;
    the names of the classifier's classes; and what the user should know."""
    classes, count, title = tuple(source.classes), classifier.num_classes, classifier.title
    present = np.unique(labels_of(source))
    if not len(present):
        raise ValueError(f"{place} has no images; give data with some")
    if wrong := [label for label in present.tolist() if not 0 <= label < len(classes)]:
        what = f"{place} has the label {wrong[-1]}; expected 0 to {len(classes) - 1}"
        raise ValueError(f"{what}, as it has that many classes")
    known = {name: index for index, name in enumerate(classifier.labels or ())}
    shown = [classes[label] for label in present]
    if classifier.labels is not None and (not _numbers(shown) or any(name in known for name in shown)):
        if others := [name for name in shown if name not in known]:
            what = f"{place} has {len(others)} of {len(present)} classes that {title} was not trained on"
            raise ValueError(f"{what}: {some(others)}; it knows {some(classifier.labels)}")
        places = np.array([known.get(name, -1) for name in classes])
        return places, classifier.labels, _missing(places[present], classifier.labels, title, place)
    among = indices_of(classes) if count == len(synsets()) else None
    if among is not None:
        return among, imagenet_names(), _missing(among[present], imagenet_names(), title, place)
    if _numbers(classes):
        if outside := [name for name in shown if not 0 <= int(name) < count]:
            raise ValueError(f"{place} has the label {outside[-1]}, outside the range of {title}: 0 to {count - 1}")
        names = classifier.labels or tuple(map(str, range(count)))
        places = np.array([int(name) for name in classes])
        notes = _missing(places[present], names, title, place)
        if classifier.labels:
            notes = (f"{place} names its classes by number: 0 is {names[0]}, the first that {title} knows", *notes)
        return places, names, notes
    if len(classes) == count:
        note = f"{title} does not name its classes; they are taken to be those of {place}, in order: {some(classes, 3)}"
        return np.arange(count), classes, (note, *_missing(present, classes, title, place))
    what = f"{place} has {len(classes)} classes, {title} tells {count} apart and does not name them"
    raise ValueError(f"{what}; give data with as many, or with class folders named by number")


def _numbers(names: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-?[0-9]+", name) for name in names)


def _missing(present: np.ndarray, names: Sequence[str], title: str, place: str) -> tuple[str, ...]:
    """What is said of classes without images; `present` are numbers of the others."""
    count, there = len(names), set(present.tolist())
    if len(there) == count:
        return ()
    what = f"{place} has images of {len(there)} of the {count} classes of {title}; all {count} compete"
    return (f"{what}; there are none of {some([name for i, name in enumerate(names) if i not in there], 20)}",)


def _imagenet_sets(request: Request, classifiers: Sequence[Classifier]) -> Iterator[ImageNetSet]:
    """The sets that DATA is or holds; none if it is other data, or if the classifiers know other classes."""
    name, path = next((name for name in request.suite if name in SETS), None), Path(request.data or "")
    others = [one for one in classifiers if one.num_classes != len(synsets()) or one.labels not in (None, synsets())]
    if name is None and (others or not request.data or not path.is_dir()):
        return
    if others:
        what = f"--suite {name} is about ImageNet's 1,000 classes, {others[0].title} has {others[0].num_classes}"
        raise ValueError(f"{what}; give a classifier of those")
    channels, given = classifiers[0].transforms.channels, {"imagenet-real": request.real_labels}
    if name is not None:
        if not request.data:
            raise ValueError(f"--suite {name} needs DATA, the unpacked folder")
        yield open_set(path, name, channels, given.get(name))
        return
    places = find_sets(path)
    if not places and "imagenet" in (named := path.resolve().name).lower() and (called := called_after(named)):
        places = {called: path}  # says what is wrong with it: other classes would compete if it were taken as it is
    opened = {name: open_set(place, name, channels, given.get(name)) for name, place in places.items()}
    plain, real = opened.get("imagenet"), opened.get("imagenet-real")
    if plain and real and places["imagenet"] == places["imagenet-real"]:  # the same images are asked about once
        row = {plain.source.name(index): index for index in range(len(plain.source))}
        accepted = {row[real.source.name(index)]: right for index, right in (real.accepted or {}).items()}
        opened["imagenet"] = replace(plain, accepted=accepted)
        del opened["imagenet-real"]
    yield from opened.values()


def _of_set(one: ImageNetSet, classifier: Classifier, request: Request) -> Task:
    source, accepted = sample(one.source, request.samples, request.seed or 0), one.accepted
    if accepted is not None and isinstance(source, View):
        accepted = {place: accepted[row] for place, row in enumerate(source.rows.tolist()) if row in accepted}
    return Task(classifier, source, imagenet_names(), one.title, one.kept, accepted)
