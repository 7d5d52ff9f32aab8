"""`broadsight analyze` as users type it."""

import json
from xml.etree import ElementTree

import pytest
from PIL import Image

from broadsight.analysis import record as analysis_record
from broadsight.cli.main import main
from broadsight.runs.opening import task_of
from tests.analysis.measures.test_measures import NAMES as MEASURES
from tests.training.small_runs import SIZE, fill, leave_run

SMALL = ["--workers", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("images"), cat=2, dog=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    vit, _ = leave_run(place / "vit", "test_vit", model_args={"img_size": SIZE})
    return str(vit), str(leave_run(place / "resnet")[0])


@pytest.fixture
def undrawn(monkeypatch) -> list[str]:
    """Figures are drawn but not written, which takes longest; their headings."""
    headings = []

    def save(figure, path):
        headings.append(figure.get_suptitle())
        open(path, "w").close()

    monkeypatch.setattr(analysis_record, "save", save)
    return headings


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(["analyze", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_list(call, tmp_path):
    for given in ((), ("list",)):
        code, out, err = call(*given)
        assert (code, err) == (0, "") and all(name in out for name in MEASURES)
    entries = json.loads(call("list", "--json")[1])
    assert [entry["name"] for entry in entries] == MEASURES
    assert entries[0].keys() >= {"about", "needs", "examples", "source", "images", "least", "labels", "options"}
    assert call("list", "--json", "list.json")[0] == 0
    assert json.loads((tmp_path / "list.json").read_text()) == entries


def test_writes_figures_and_record(call, runs, images, tmp_path):
    code, out, err = call("variance", *runs, "--data", images, "--plot", "more.pdf", *SMALL)
    assert code == 0, err
    folder = tmp_path / "analyses" / "variance-vit-and-1-more-1"
    assert sorted(path.name for path in folder.iterdir()) == ["analysis.json", "figure.png", "figure.svg"]
    with Image.open(folder / "figure.png") as image:
        assert min(image.size) > 300
    assert ElementTree.parse(folder / "figure.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "more.pdf").read_bytes().startswith(b"%PDF")
    record = json.loads((folder / "analysis.json").read_text())
    assert [model["label"] for model in record["models"]] == ["vit", "resnet"]
    assert record["command"].startswith("broadsight analyze variance") and record["settings"]["correction"] == 1
    assert "variance: vit" in out and "layer1.0" in out and f"written: {folder.relative_to(tmp_path)}" in out
    assert [path.name for path in (tmp_path / "analyses").iterdir()] == [folder.name]


def test_folders_are_numbered_and_never_overwritten_and_json_goes_where_asked(call, runs, images, undrawn, tmp_path):
    given = "entropy", runs[0], "--data", images, *SMALL
    for number in (1, 2):
        assert call(*given)[0] == 0
        assert (tmp_path / "analyses" / f"entropy-vit-{number}" / "analysis.json").is_file()
    (tmp_path / "empty").mkdir()
    assert call(*given, "--out", "empty")[0] == 0
    code, _, err = call(*given, "--out", "empty")
    assert code == 2 and "is not an empty folder" in err and err.count("\n") == 1
    arguments = ("similarity", runs[0], "--data", images, *SMALL, "--set", "with_itself=true", "--out")
    code, out, _ = call(*arguments, "one", "--json")
    printed = json.loads(out)
    assert code == 0 and printed["settings"] == {"with_itself": True}
    assert printed == json.loads((tmp_path / "one" / "analysis.json").read_text())
    assert call(*arguments, "two", "--json", "record.json")[0] == 0
    assert json.loads((tmp_path / "record.json").read_text())["models"] != []


def test_random_weights_are_said_everywhere(call, undrawn, tmp_path):
    small = ("--no-pretrained", "--samples", "2", "--size", "32", "--out", "o", *SMALL)
    code, out, err = call("dead", "test_resnet", *small)
    assert code == 0, err
    assert "built-in scenes" in err and "random weights" in err and "test_resnet, random weights" in out
    assert all("RANDOM WEIGHTS" in heading for heading in undrawn) and undrawn
    record = json.loads((tmp_path / "o" / "analysis.json").read_text())
    assert record["models"][0]["weights"] == "random" and "RANDOM WEIGHTS" in record["title"]
    assert record["data"]["images"] == 2 and record["data"]["data"] == "scenes"


def test_weights_of_a_file(call, runs, images, undrawn, tmp_path):
    weights = f"{runs[1]}/model.safetensors"
    given = ("--data", images, "--model-args", "num_classes=2", *SMALL, "--size", SIZE, "--json", "-")
    named = "variance", f"test_resnet@{weights}", "--out", "a"
    option = "variance", "test_resnet", "--checkpoint", weights, "--out", "b"
    one, other = (json.loads(call(*words, *given)[1])["models"][0] for words in (named, option))
    assert one["weights"] == weights and other["result"] == one["result"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["entropi", "VIT"], "did you mean 'entropy'?"),
        (["VIT", "entropy"], "the measure comes first: broadsight analyze entropy"),
        (["test_vit"], "test_vit is a model, the measure comes first"),
        (["entropy"], "needs MODEL|RUN"),
        (["entropy", "RESNET"], "has no attention; entropy needs attention, as in vit_small"),
        (["entropy", "RESNET"], "there are variance, dead, spectrum"),
        (["tokens", "VIT"], "has no multi-token pooling; tokens needs multi-token pooling, as in map_resnet50"),
        (["entropy", "no_such_net"], "unknown model 'no_such_net'"),
        (["entropy", "mat_2"], "--no-pretrained"),
        (["entropy", "VIT", "--set", "x=1"], "has no option 'x'"),
        (["interaction", "VIT", "--set", "pairs=many"], "pairs=many; expected a value like 6"),
        (["interaction", "VIT", "--set", "score=odd"], "vit: score='odd' is not known"),
        (["entropy", "VIT", "--plot", "x.gif"], "expected a name ending in png, svg, pdf"),
        (["entropy", "VIT", "--plot", "nowhere/x.png"], "there is no folder"),
        (["entropy", "VIT", "--samples", "0"], "--samples 0"),
        (["entropy", "VIT", "--smaples", "3"], "did you mean --samples?"),
        (["removal", "VIT", "--data", "FLAT"], "removal needs labelled images"),
        (["variance", "VIT", "--data", "BAD"], "none of 1 images can be read"),
        (["variance", "VIT", "--data", "EMPTY"], "without images"),
        (["variance", "VIT", "--data", "missing"], "no such data: missing"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, said, call, runs, images, tmp_path):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "bad.jpg").write_text("no image")
    places = {"VIT": runs[0], "RESNET": runs[1], "FLAT": images / "cat", "BAD": "bad.jpg", "EMPTY": "EMPTY"}
    given = [places.get(word, word) for word in arguments]
    data = [] if "--data" in given else ["--data", images]
    code, out, err = call(*given, *data, *SMALL)
    assert code == 2 and said in err and not out
    assert err.startswith("broadsight: ") and err.count("\n") == 1
    assert not (tmp_path / "analyses").exists()


def test_a_image_that_is_none_is_skipped_and_named(call, runs, undrawn, tmp_path):
    fill(tmp_path, flat=2)
    (tmp_path / "flat" / "bad.png").write_text("no image")
    code, _, err = call("variance", runs[1], "--data", "flat", "--out", "o", *SMALL)
    assert code == 0 and "1 image could not be read and left out: flat/bad.png" in err
    record = json.loads((tmp_path / "o" / "analysis.json").read_text())
    assert list(record["skipped"]) == ["flat/bad.png"] and record["models"][0]["result"]["images"] == 2
    code, _, err = call("variance", runs[1], "--data", "flat", "--strict", *SMALL)
    assert code == 2 and "bad.png cannot be read" in err


def test_an_interrupt_leaves_nothing_half_written(call, runs, images, monkeypatch, tmp_path):
    def stop(figure, path):
        if str(path).endswith("svg"):
            raise KeyboardInterrupt
        open(path, "w").close()

    monkeypatch.setattr(analysis_record, "save", stop)
    code, _, err = call("variance", runs[1], "--data", images, "--out", "o", *SMALL)
    assert (code, err) == (130, "broadsight: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_dense_runs_show_their_backbone(call, undrawn, monkeypatch, tmp_path):
    from broadsight.dense.build import make_dense_model
    from tests.training.dense_runs import SMALL_HEADS

    arguments = dict(head="retinanet", backbone="test_resnet", head_args=SMALL_HEADS["retinanet"])
    inner = make_dense_model(**arguments, num_classes=2)
    settings = dict(data="scenes:8", seed=0, head="retinanet", neck="fpn", model="test_resnet", task="detect")
    settings |= dict.fromkeys(("pool", "broadcast", "val", "split"))
    labels = dict(category_ids={}, keypoint_names=[], flip_pairs=[], skeleton=[], keypoint_offset=0.0)
    about = dict(task="detect", settings=settings, recipe=dict(image_size=64), labels=labels, parameters=1)
    config = dict(architecture="dense_model", num_classes=2, label_names=["a", "b"], pretrained_cfg={})
    config |= dict(model_args=arguments, broadsight=about)
    (tmp_path / "det").mkdir()
    (tmp_path / "det" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("broadsight.runs.dense_model.load_given", lambda model, path: None)
    monkeypatch.setattr("broadsight.runs.dense_model.make_dense_model", lambda **_: inner)
    code, out, err = call("variance", "det", "--out", "o", *SMALL)
    assert code == 0, err
    assert "retinanet-test_resnet backbone" in out and "network.layer1.0" in out
    code, _, err = call("removal", "det", *SMALL)
    assert code == 2 and "is a dense run" in err and "there are variance, dead, spectrum, receptive-field" in err
    assert task_of(tmp_path / "det") == "detect"
