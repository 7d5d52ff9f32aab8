"""Analyses through the functions: which models and images they are of, what they give, what they refuse."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

import broadsight
from broadsight import analysis
from broadsight.analysis.images import Batches, images_for, open_images
from broadsight.analysis.record import heading, plain, record_of
from broadsight.analysis.request import Request
from broadsight.analysis.run import analyze
from broadsight.analysis.subjects import open_subjects
from broadsight.weights.writing import write_weights
from tests.runs.test_classifier import described
from tests.training.small_runs import SIZE, fill, leave_run, refusal

SMALL = dict(size=SIZE, workers=0, threads=1, device="cpu")
RANDOM = SMALL | dict(pretrained=False)  # of timm names


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("images"), cat=4, dog=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return leave_run(tmp_path_factory.mktemp("runs") / "mine", "test_vit", model_args={"img_size": SIZE})


@pytest.fixture(scope="module")
def pooled(tmp_path_factory, images):
    """A run with multi-token pooling as training leaves it, which says what it was trained on."""
    folder, _ = leave_run(tmp_path_factory.mktemp("runs") / "pooled")
    pool = dict(groups=2, tokens=2, dim=24, heads=2, mlp_dim=48)
    model = broadsight.swap_pool("test_resnet", "map", **pool, num_classes=2)
    write_weights(model, folder / "model.safetensors")
    settings = dict(data=str(images), val=None, split=0.3, root=None, seed=0, model="test_resnet", pool="map")
    settings |= dict(broadcast=None, pool_args=pool)
    about = dict(task="classify", settings=settings, recipe=dict(image_size=SIZE, intra=1.0, inter=-0.8))
    made = dict(backbone="test_resnet", pool="map", pool_args=pool)
    described(folder, architecture="edited", label_names=["cat", "dog"], model_args=made, broadsight=about)
    (folder / "metrics.jsonl").write_text('{"kind": "epoch", "val_top1": 40.0}\n{"kind": "epoch", "val_top1": 75.0}\n')
    return folder


def ask(measure, *models, **options):
    return Request(measure, tuple(map(str, models)), **SMALL | options)


def test_entropy_is_that_of_the_function(images, run):
    folder, model = run
    found = analyze(ask("entropy", folder, data=str(images), batch=3))
    (subject,) = found.subjects
    see = subject.transforms.build(False)
    seen = [torch.as_tensor(see(Image.open(path).convert("RGB"))) for path in sorted(images.rglob("*.png"))]
    expected = analysis.attention_entropy(model, subject.normalise(torch.stack(seen)))
    assert found.results == {"mine": pytest.approx(expected)}
    record = json.loads(json.dumps(record_of(found)))
    assert (record["measure"], record["seed"]) == ("entropy", 0)
    assert record["command"].startswith("broadsight.analyze('entropy', [")
    assert record["data"]["images"] == record["data"]["there"] == 7
    (inner,) = record["models"]
    assert inner["weights"] == "run" and inner["input_size"] == [3, SIZE, SIZE]
    assert [layer["name"] for layer in inner["result"]["layers"]] == list(expected)
    assert record["how"]["batch"] == 3 and record["versions"]["torch"] and not record["skipped"]
    value = {"a": (1, 2.5, float("nan")), 3: [float("inf"), True, None], "t": torch.nn.Identity()}
    assert plain(value) == {"a": [1, 2.5, None], "3": [None, True, None], "t": "Identity()"}


def test_all_models_see_the_same_sample_and_random_weights_come_from_the_seed(images, run):
    asked = ask("variance", run[0], "test_resnet", data=str(images), samples=4, seed=1, pretrained=False)
    subjects = open_subjects(asked)
    assert [one.label for one in subjects] == ["mine", "test_resnet, random weights"]
    found, sources = images_for(asked, analysis.MEASURES["variance"], subjects, {})
    names = [[source.name(i) for i in range(len(source))] for source, _ in sources]
    assert names[0] == names[1] and len(names[0]) == 4
    assert found.description["images"] == 4
    other = images_for(replace(asked, seed=5), analysis.MEASURES["variance"], subjects, {})
    assert [other[1][0][0].name(i) for i in range(4)] != names[0]

    def weights(seed):
        (one,) = open_subjects(ask("variance", "test_resnet", seed=seed, pretrained=False))
        return next(one.model.parameters())

    assert torch.equal(weights(3), weights(3)) and not torch.equal(weights(3), weights(4))


def test_batches_begin_again_and_skip_what_is_no_image(images, run, tmp_path):
    folder = fill(tmp_path, flat=7) / "flat"
    (folder / "bad.png").write_text("no image")
    asked = Request("variance", (str(run[0]),), data=str(folder), **SMALL)
    subjects = open_subjects(asked)
    found, ((source, labels),) = images_for(asked, analysis.MEASURES["variance"], subjects, {})
    skipped: dict[str, str] = {}
    batches = Batches(subjects[0], source, labels=labels, batch=3, workers=0, strict=False, skipped=skipped)
    first, again = list(batches), list(batches)
    assert [len(batch) for batch in first] == [3, 3, 1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert list(skipped) == [f"{folder}/bad.png"]
    whole = analyze(asked)
    assert any("1 image could not be read and left out" in note and "bad.png" in note for note in whole.notes)
    assert "7 images of flat" in heading(whole)
    strict = refusal(lambda: analyze(Request("variance", (str(run[0]),), data=str(folder), strict=True, **SMALL)))
    assert "bad.png cannot be read" in strict and "--strict" in strict


def test_scenes_are_so_many_as_asked_and_pairs_and_lists_are_read(tmp_path):
    asked = ask("variance", "test_resnet", pretrained=False)
    subjects = open_subjects(asked)
    found = open_images(subjects, replace(asked, data="scenes:6"), labelled=False)
    assert len(found.source) == 6 and found.source.name(0).startswith("scenes/val/")
    assert found.description["data"] == "scenes:6" and found.notes == ()
    found = open_images(subjects, asked, labelled=False)
    assert len(found.source) == 2000 and "built-in scenes" in found.notes[0]
    for wrong in ("scenes:0", "scenes:many", "scenes:-3"):
        request = replace(asked, data=wrong)
        assert "is not a count" in refusal(lambda request=request: open_images(subjects, request, labelled=False))
    asked = replace(asked, data=str(tmp_path))
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 40)).save(tmp_path / name / "a.png")
    found = open_images(subjects, asked, labelled=False)
    assert [found.source.name(i) for i in range(len(found.source))] == [f"{tmp_path}/images/a.png"]
    (tmp_path / "list.txt").write_text("images/a.png\n")
    listed = replace(asked, data=str(tmp_path / "list.txt"))
    assert len(open_images(subjects, listed, labelled=False).source) == 1


def test_labels_reach_the_tokens(images, pooled, tmp_path):
    found = analyze(ask("tokens", pooled))
    (votes,) = found.results.values()
    assert votes.images == 2 and votes.bias in (0.0, 0.5, 1.0)  # a hold-out of one cat and one dog
    assert found.found.description["part"] == "val"
    assert any(note.startswith("curves over the number of class tokens need runs") for note in found.notes)
    assert votes.series == "test_resnet-map, dim 24, heads 2, mlp_dim 48, intra 1, inter -0.8"
    unlabelled = analyze(ask("tokens", pooled, data=str(images / "*" / "00*.png")))
    (votes,) = unlabelled.results.values()
    assert votes.images == 7 and votes.bias is None and any("has no labels" in note for note in unlabelled.notes)
    # labels that do not fit are left out if they can be
    data = str(fill(tmp_path, bird=2, fish=2))
    found = analyze(ask("tokens", pooled, data=data))
    assert found.results["test_resnet-map"].bias is None
    assert any("labels are not used: " in note and "bird" in note for note in found.notes)
    assert "was not trained on: bird, fish" in refusal(lambda: analyze(ask("removal", pooled, data=data)))


def test_removal_asks_a_classifier_about_labelled_images(images, pooled):
    options = {"fractions": (0.0, 0.5), "saliency": "gradcam"}
    found = analyze(ask("removal", pooled, data=str(images), part="all", set=options))
    (curves,) = found.results.values()
    assert curves.images == 7 and curves.fractions == (0.0, 0.5)
    assert found.settings["seed"] == 0 and found.settings["dino_checkpoint"] is None


def test_front_of_a_run_has_the_accuracy_of_its_training_or_that_on_data(images, pooled):
    found = analyze(Request("front", (str(pooled),), threads=1, device="cpu", size=SIZE))
    assert list(found.results) == ["latency_ms", "macs", "parameters"]
    ((point,),) = [one.points for one in found.results["parameters"].fronts]
    assert (point.x, point.accuracy) == (sum(p.numel() for p in found.subjects[0].model.parameters()), 75.0)
    assert point.size == SIZE
    record = record_of(found)
    assert record["results"]["macs"]["fronts"][0]["points"][0]["label"] == "test_resnet-map"
    assert "result" not in record["models"][0]
    # asked about data: a model whose bias makes it say cat, and one beside it without a word about its classes
    options = dict(data=str(images), part="all", set={"x": "macs"}, model_args={"num_classes": 2})
    found = analyze(Request("front", (str(pooled), "test_resnet"), **options, **RANDOM))
    points = [point for one in found.results["macs"].fronts for point in one.points]
    assert {point.label for point in points} == {"test_resnet-map", "test_resnet, random weights"}
    assert all(round(7 * point.accuracy / 100, 6).is_integer() for point in points)
    assert {point.data for point in points} == {f"{images}, all"}
    assert "RANDOM WEIGHTS: test_resnet" in heading(found)


def test_front_of_published_tables_beside_a_run(pooled):
    asked = dict(threads=1, device="cpu", size=SIZE, set={"competitors": ("map-ga", "mat")})
    found = analyze(Request("front", (str(pooled),), **asked))
    assert list(found.results) == ["latency_ms", "latency_ms, RTX 3090 as published", "macs", "parameters"]
    assert [len(one.fronts) for one in found.results.values()] == [1, 1, 3, 2]
    assert found.notes == ("left out, size unknown: GA-ResNet50, MAP-ResNet50, GA-ViT-S, MAP-ViT-S",)
    point = record_of(found)["results"]["macs"]["fronts"][2]["points"][0]
    assert (point["label"], point["size"], point["machine"], point["highlight"]) == ("EfficientViT-M4", 224, "", False)
    alone = analyze(Request("front", (), set={"competitors": "all", "x": "latency_ms"}))
    assert len(alone.results) == 3 and heading(alone).startswith("front: map, map-scaled")


def test_front_refusals(run, tmp_path):
    assert "needs MODEL|RUN" in refusal(lambda: analyze(Request("front", ())))
    assert "needs --data" in refusal(lambda: analyze(ask("front", "test_resnet", pretrained=False)))
    for options, words in (
        (dict(competitors="mapp"), "did you mean 'map'?"),
        (dict(x="latency_ms"), "prints no times"),
    ):
        wrong = Request("front", (), set=dict(competitors="mat") | options)
        assert words in refusal(lambda wrong=wrong: analyze(wrong))
    assert "none of our models" in refusal(lambda: analyze(Request("front", (), set={"paper": "x_*"})))
    (tmp_path / "bad.json").write_text("{}")
    assert "holds no accuracy" in refusal(lambda: analyze(Request("front", (str(tmp_path / "bad.json"),))))


def test_an_interrupt_keeps_what_is_done_and_progress_counts_all_images(images, run):
    def stop(done, total, doing):
        if done > 7:
            raise KeyboardInterrupt

    asked = ask("entropy", run[0], "test_vit", data=str(images), batch=2, pretrained=False)
    found = analyze(asked, stop)
    assert list(found.results) == ["mine"] and found.how["interrupted"]
    assert "interrupted: test_vit, random weights left out" in found.notes
    assert [one["label"] for one in record_of(found)["models"]] == ["mine"]
    assert "RANDOM" not in heading(found)
    with pytest.raises(KeyboardInterrupt):
        analyze(asked, lambda done, total, doing: stop(8, total, doing))
    # progress counts images of all models, and runs of one model are called by their folders
    seen = []
    asked = ask("variance", run[0], run[0], data=str(images), batch=4)
    found = analyze(asked, lambda done, total, doing: seen.append((done, total)))
    assert list(found.results) == ["mine, mine", "mine, mine (2)"]
    assert seen == [(0, 14), (4, 14), (7, 14), (7, 14), (11, 14), (14, 14)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(models=()), "needs MODEL|RUN"),
        (dict(batch=0), "--batch 0; expected 1 or more"),
        (dict(models=("a", "b"), checkpoint="w.pt"), "write NAME@w.pt"),
        (dict(models=("test_vit@missing.safetensors",)), "missing.safetensors"),
        (dict(measure="interaction", set={"target": "label"}, data="FLAT"), "interaction needs labelled images"),
        (dict(data="FLAT", part="val"), "class folders"),
        (dict(size=20), "--size 20"),
    ],
)
def test_refusals(options, said, images):
    options = dict(measure="entropy", models=("test_vit",), data=str(images)) | RANDOM | options
    options["data"] = options["data"].replace("FLAT", str(images / "cat"))
    message = refusal(lambda: analyze(Request(**options)), (ValueError, FileNotFoundError))
    assert said in message and "\n" not in message


def test_too_few_images_and_channels_that_do_not_agree(run, tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "one.png")
    (tmp_path / "two.png").write_text("")
    measure = analysis.MEASURES["tokens"]
    subjects = open_subjects(ask("tokens", run[0]))

    def found(data, **more):
        return images_for(Request("tokens", (str(run[0]),), data=data, **SMALL, **more), measure, subjects, {})

    assert "too few images, 1; tokens needs 2" in refusal(lambda: found(str(tmp_path / "one.png")))
    assert "--samples 1; tokens needs 2 images" in refusal(lambda: found(str(tmp_path), samples=1))
    none = refusal(lambda: analyze(Request("entropy", (str(run[0]),), data=str(tmp_path / "two.png"), **SMALL)))
    assert "none of 1 images can be read" in none
    # channels must agree
    grey, _ = leave_run(tmp_path / "grey", model_args={"in_chans": 1})
    assert "different channels" in refusal(lambda: open_subjects(ask("variance", run[0], grey)))
    assert analyze(ask("variance", grey, data="scenes:2")).results["grey"].images == 2


def test_weights_that_cannot_be_fetched(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the pretrained weights of resnet18 cannot be had: no connection.")

    monkeypatch.setattr("broadsight.runs.opening.open_classifier", fail)
    said = refusal(lambda: open_subjects(Request("variance", ("resnet18",))))
    assert said.startswith("the pretrained weights of resnet18 cannot be had: no connection; give others as resnet18@")
    assert said.endswith("resnet18@FILE, or try random ones by --no-pretrained")
