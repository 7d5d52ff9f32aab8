"""Which classifier is asked about which images, under which numbers."""

import json
from importlib.resources import files

import numpy as np
import pytest

from broadsight.data.scenes import Scenes
from broadsight.data.view import labels_of
from broadsight.evaluation.request import Request
from broadsight.evaluation.tasks import check, match_classes, open_classifiers, open_tasks, suites_of
from broadsight.runs.classifier import open_classifier
from broadsight.runs.names import imagenet_names, synsets

from ..training.small_runs import fill, leave_run, refusal


def random_of(classes):
    return open_classifier("test_resnet", pretrained=False, model_args={"num_classes": classes}, device="cpu")


def name_classes(folder, names):
    """As if a run had been trained on classes of these names."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "label_names": names}))


@pytest.fixture(scope="module")
def thousand():
    return random_of(1000)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that calls its classes c, a, b."""
    folder, _ = leave_run(tmp_path_factory.mktemp("run") / "run", num_classes=3)
    name_classes(folder, ["c", "a", "b"])
    return folder


class Labelled:
    """Images that are never opened."""

    def __init__(self, classes, labels):
        self.classes, self.labels = classes, np.array(labels)

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return int(self.labels[index])


def test_match__by_name_whatever_the_order_synsets_and_numbers_by_value(run, thousand):
    classifier = open_classifier(run, device="cpu")
    found = match_classes(classifier, Labelled(["a", "b", "c"], [0, 1, 2]), "d")
    assert (found[0].tolist(), *found[1:]) == ([1, 2, 0], ("c", "a", "b"), ())
    some = match_classes(classifier, Labelled(["a", "b"], [0, 1]), "d")
    assert some[2] == ("d has images of 2 of the 3 classes of run; all 3 compete; there are none of c",)
    unknown = match_classes(classifier, Labelled(["a", "z"], [0, 0]), "d")  # a class without images
    assert unknown[0].tolist() == [1, -1]
    places, names, _ = match_classes(thousand, Labelled(["n01443537", "n01440764"], [0, 1]), "d")
    assert places.tolist() == [1, 0] and names == imagenet_names()
    places, names, _ = match_classes(random_of(12), Labelled(["10", "2"], [0, 1]), "d")
    assert places.tolist() == [10, 2] and names[10] == "10"


def test_match__numbers_are_places_among_the_names_and_else_classes_are_in_order(run):
    classifier = open_classifier(run, device="cpu")
    places, names, notes = match_classes(classifier, Labelled(["0", "2"], [0, 1]), "d")
    assert (places.tolist(), names) == ([0, 2], ("c", "a", "b"))
    assert notes[0] == "d names its classes by number: 0 is c, the first that run knows"
    said = refusal(lambda: match_classes(classifier, Labelled(["0", "3"], [0, 1]), "d"))
    assert said == "d has the label 3, outside the range of run: 0 to 2"
    places, names, notes = match_classes(random_of(2), Labelled(["cat", "dog"], [0, 1]), "d")
    assert (places.tolist(), names) == ([0, 1], ("cat", "dog"))
    assert notes == ("test_resnet does not name its classes; they are taken to be those of d, in order: cat, dog",)


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (["a", "y", "z"], [0, 1, 2], "d has 2 of 3 classes that run was not trained on: y, z; it knows c, a, b"),
        (["a"], [], "d has no images"),
        (["a", "b"], [0, 2], "d has the label 2; expected 0 to 1, as it has that many classes"),
        (["a", "b"], [0, -1], "d has the label -1; expected 0 to 1"),
        (["-1", "0"], None, "d has the label -1, outside the range of test_resnet: 0 to 3"),
        (["0", "12"], None, "d has the label 12, outside the range of test_resnet: 0 to 3"),
        (["a", "b"], None, "d has 2 classes, test_resnet tells 4 apart and does not name them; give data with as many"),
    ],
)
def test_match__refused(run, classes, labels, message):
    """By a run, or where no labels are given by a timm name."""
    classifier = random_of(4) if labels is None else open_classifier(run, device="cpu")
    source = Labelled(classes, [0, 1] if labels is None else labels)
    assert refusal(lambda: match_classes(classifier, source, "d")).startswith(message)


def test_tasks__labels_are_the_models_and_a_sample_is_the_same_for_all(run, tmp_path):
    data = str(fill(tmp_path / "data", 8, a=7, b=8, c=9))
    asked = Request(str(run), data, device="cpu")
    found, ((task,),) = open_tasks(asked, open_classifiers(asked))
    assert "".join(task.names[label] for label in labels_of(task.source)) == "a" * 7 + "b" * 8 + "c" * 9
    assert found.description["part"] == "all" and found.notes == ()
    asked = Request(str(run), data, samples=5, beside=(str(run),), device="cpu", seed=1)
    _, ((one, other),) = open_tasks(asked, open_classifiers(asked))
    assert [one.source.name(row) for row in range(5)] == [other.source.name(row) for row in range(5)]
    assert (len(one.source), other.classifier.title) == (5, "run (2)")


def test_asked__other_weights_and_channels_and_data_that_no_run_names(run, tmp_path):
    asked = Request(str(run), beside=(f"test_resnet@{tmp_path / 'none.safetensors'}",), device="cpu")
    said = refusal(lambda: open_classifiers(asked), FileNotFoundError)
    assert said.endswith("give a run folder or a file of weights")
    grey, _ = leave_run(tmp_path / "grey", num_classes=3, model_args={"in_chans": 1})
    asked = Request(str(run), beside=(str(grey),), device="cpu")
    assert refusal(lambda: open_classifiers(asked)).startswith("grey takes 1 channels, run 3; side by side")
    asked = Request(str(run), device="cpu")
    said = refusal(lambda: open_tasks(asked, open_classifiers(asked)))
    assert said == f"{run} does not say on what it was trained; give DATA to evaluate it on"


def test_asked__refused_at_once_and_robustness_is_all_suites():
    for options, message in (
        (dict(batch=0), "--batch 0; expected 1 or more"),
        (dict(samples=0), "--samples 0; expected 1 or more"),
        (dict(metrics=("top_1",)), "unknown metric 'top_1'; did you mean 'top1'? expected one of top1"),
        (dict(suite=("x",)), "unknown suite 'x'; suites are occlusion, "),
        (dict(suite=("imagenet-a", "imagenet-r")), "DATA is one set, not imagenet-a and imagenet-r"),
    ):
        assert refusal(lambda options=options: check(Request("m", **options))).startswith(message)
    assert suites_of(Request("m", suite=("fgsm", "imagenet-a"))) == ("fgsm",)
    assert suites_of(Request("m", suite=("robustness",))) == ("occlusion", "fgsm", "salient", "corruptions")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """A folder with the validation set and ImageNet-A, one image of each class, all of them empty."""
    root = tmp_path_factory.mktemp("imagenet")
    for number, synset in enumerate(synsets(), 1):
        (root / "val" / synset).mkdir(parents=True)
        (root / "val" / synset / f"ILSVRC2012_val_{number:08d}.JPEG").touch()
    for synset in (files("timm.data") / "_info" / "imagenet_a_synsets.txt").read_text().split():
        (root / "imagenet-a" / synset).mkdir(parents=True)
        (root / "imagenet-a" / synset / "0.jpg").touch()
    return root


def test_imagenet__every_set_of_a_folder_or_the_one_that_is_asked_for(families, thousand):
    asked = Request("test_resnet", str(families))
    found, groups = open_tasks(asked, [thousand])
    (val,), (hard,) = groups
    assert (val.title, hard.title) == ("ImageNet", "ImageNet-A")
    assert val.kept is None and len(hard.kept) == 200 and len(hard.source) == 200
    assert set(labels_of(hard.source)) == set(hard.kept.tolist())
    # The same images serve ReaL: some have no label that people agree on
    assert val.accepted is not None and 0 < len(val.accepted) <= 1000
    assert labels_of(val.source).tolist() == list(range(1000))
    # and the one that is asked for, whose samples keep their accepted labels
    asked = Request("test_resnet", str(families / "imagenet-a"), suite=("imagenet-a",), samples=7)
    _, ((task,),) = open_tasks(asked, [thousand])
    assert len(task.source) == 7 and len(task.kept) == 200
    said = refusal(lambda: open_tasks(Request("m", str(families / "imagenet-a"), suite=("imagenet-r",)), [thousand]))
    assert "is ImageNet-A by its names, not ImageNet-R" in said
    asked = [Request("m", str(families / "val"), suite=("imagenet-real",), samples=samples) for samples in (None, 9)]
    whole, some = (open_tasks(one, [thousand])[1][0][0] for one in asked)
    accepted = {whole.source.name(row): right for row, right in whole.accepted.items()}
    assert some.accepted == {row: accepted[some.source.name(row)] for row in range(9)}


def test_imagenet__a_folder_called_so_must_be_so_and_the_model_know_its_classes(families, run, thousand, tmp_path):
    for synset in synsets()[:3]:
        (tmp_path / "imagenet-r" / synset).mkdir(parents=True)
        (tmp_path / "imagenet-r" / synset / "0.jpg").touch()
    said = refusal(lambda: open_tasks(Request("m", str(tmp_path / "imagenet-r")), [thousand]))
    assert "has 3 class folders, " in said and "of ImageNet-R's 200" in said
    (tmp_path / "imagenet-r").rename(tmp_path / "three")
    found, ((task,),) = open_tasks(Request("m", str(tmp_path / "three")), [thousand])
    assert labels_of(task.source).tolist() == [0, 1, 2] and task.kept is None
    asked = Request(str(run), str(families / "imagenet-a"), suite=("imagenet-a",), device="cpu")
    said = refusal(lambda: open_tasks(asked, open_classifiers(asked)))
    assert said.startswith("--suite imagenet-a is about ImageNet's 1,000 classes, run has 3")


def test_scenes__drawn_at_the_size_of_the_model(tmp_path):
    folder, _ = leave_run(tmp_path / "run", num_classes=10)
    name_classes(folder, Scenes(1).classes)
    asked = Request(str(folder), "scenes:40", part="test", device="cpu")
    found, ((task,),) = open_tasks(asked, open_classifiers(asked))
    assert (len(task.source), task.source.open(0).size, found.place) == (10, (32, 32), "scenes/test")
