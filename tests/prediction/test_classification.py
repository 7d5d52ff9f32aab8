"""What images show: the numbers of a direct pass, the order, the files, and the command."""

import csv
import dataclasses
import io
import json
import os
from contextlib import closing, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import broadsight
from broadsight.cli.main import main
from broadsight.data.names import csv_text
from broadsight.data.sources.unlabelled import Unlabelled, find_images
from broadsight.prediction import classification as predicting
from broadsight.prediction.classification import CsvWriter, JsonWriter, Prediction, Summary, predict_images, writing
from broadsight.runs.classifier import Classifier, open_classifier
from broadsight.runs.names import imagenet_names as imagenet_names

from ..refusals import refused
from ..training.small_runs import leave_run

LABELS = ("cat", "dog, wet", 'the "odd" one', "Käfer")
NOT_UNICODE = os.fsdecode(b"not \xff unicode.png")
ODD = ["a,b.png", 'q"u"ote.png', "Käfer 虫.png", "line\nbreak.png", "return\r.png", "[red]x.png", "-.png", NOT_UNICODE]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose classes have names."""
    torch.manual_seed(0)
    folder, _ = leave_run(tmp_path_factory.mktemp("run") / "run", num_classes=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"label_names": LABELS}))
    return folder


@pytest.fixture(scope="module")
def classifier(run) -> Classifier:
    return open_classifier(run, device="cpu")


@pytest.fixture
def images(tmp_path, monkeypatch) -> list[str]:
    """Seven images that differ, the fourth and the last of them broken, in a working folder."""
    monkeypatch.chdir(tmp_path)
    names = [f"{number}.png" for number in range(7)]
    for number, name in enumerate(names):
        noise(number).save(name)
    Path("3.png").write_bytes(Path("3.png").read_bytes()[:300])
    Path("6.png").write_bytes(b"")
    return names


def noise(seed: int, size: tuple[int, int] = (40, 48)) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray((random.integers(0, 90, (*size, 3)) + random.integers(0, 160, 3)).astype(np.uint8))


def by_hand(classifier: Classifier, image: Image.Image) -> torch.Tensor:
    """Probabilities (C,) by a pass of one image."""
    pixels = torch.as_tensor(classifier.transforms.build(training=False)(image)).double() / 255
    mean, std = (torch.tensor(getattr(classifier.transforms, key)).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        return classifier.model(((pixels - mean) / std).float()[None])[0].double().softmax(0)


def compare(found: Prediction, expected: torch.Tensor, top: int = 4) -> None:
    values, places = expected.sort(descending=True)
    assert found.indices == tuple(places.tolist()[:top])
    assert found.classes == tuple(LABELS[place] for place in found.indices)
    assert found.probabilities == pytest.approx(values.tolist()[:top], rel=1e-4, abs=1e-7)
    assert found.error == ""


def test_predict__is_a_direct_pass(classifier, tmp_path):
    rgb, rgba = noise(0), np.dstack([np.asarray(noise(1)), np.tile([0, 255], (40, 24))]).astype(np.uint8)
    white = np.where(rgba[..., 3:] == 255, rgba[..., :3], 255).astype(np.uint8)
    turned, exif = noise(2), Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: right-hand side on top
    grey = noise(3).convert("L")
    turned.info["exif"] = exif.tobytes()
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for file, image in zip(files, (rgb, Image.fromarray(rgba), turned, grey), strict=True):
        image.save(file, exif=image.info.get("exif", b""))
    source, _ = find_images(files)
    seen = [rgb, Image.fromarray(white), turned.rotate(-90, expand=True), grey.convert("RGB")]
    found = list(predict_images(classifier, source, top=9))
    for prediction, image in zip(found, seen, strict=True):
        compare(prediction, by_hand(classifier, image))
    assert len({prediction.probabilities for prediction in found}) == 4


def test_predict__broken_images_keep_their_place(classifier, images):
    for size in (1, 3, 64):
        found = list(predict_images(classifier, Unlabelled(images), top=2, batch=size))
        assert [prediction.file for prediction in found] == images
        for number, prediction in enumerate(found):
            if number in (3, 6):
                assert prediction == Prediction(images[number], error=prediction.error)
            else:
                compare(prediction, by_hand(classifier, noise(number)), top=2)
        assert "truncated" in found[3].error and found[6].error == "empty file"


def test_predict__workers_change_nothing_and_leave_with_whoever_stops(classifier, images):
    expected = list(predict_images(classifier, Unlabelled(images), batch=2))
    assert list(predict_images(classifier, Unlabelled(images), batch=2, workers=2)) == expected
    with closing(predict_images(classifier, Unlabelled(images), batch=2, workers=1)) as found:
        assert next(found) == expected[0]
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # between images
    assert torch.multiprocessing.active_children() == []


def test_predict__grey_models_see_grey_and_what_is_not_finite_is_no_answer(images, tmp_path):
    grey = open_classifier(leave_run(tmp_path / "run", num_classes=4, model_args=dict(in_chans=1))[0], device="cpu")
    grey = dataclasses.replace(grey, labels=LABELS)
    (found,) = predict_images(grey, Unlabelled(images[:1]))
    compare(found, by_hand(grey, noise(0).convert("L")))
    four = dataclasses.replace(grey, transforms=dataclasses.replace(grey.transforms, channels=4))
    model = Mock(side_effect=lambda x: torch.full((len(x), 4), torch.nan), num_classes=4)
    for odd, words, error in (
        (four, "images of 4 channels", ValueError),
        (dataclasses.replace(grey, model=model), "not finite", RuntimeError),
    ):
        refused(words, list, predict_images(odd, Unlabelled(images[:1])), error=error)


def test_class_names__of_the_run_of_imagenet_or_numbers(classifier):
    assert classifier.classes == LABELS
    assert dataclasses.replace(classifier, labels=None).classes == ("0", "1", "2", "3")
    thousand = torch.nn.Identity()
    thousand.num_classes = 1000
    timms = dataclasses.replace(classifier, labels=None, model=thousand, run={})
    assert timms.classes == imagenet_names() and timms.classes[0] == "tench"
    # trained on something else
    assert dataclasses.replace(timms, run={"architecture": "test_resnet"}).classes[999] == "999"


def test_useful_workers__never_more_than_batches_to_overlap(monkeypatch):
    monkeypatch.setattr(predicting, "default_workers", lambda: 3)
    assert [predicting.useful_workers(count, 64) for count in (1, 64, 65, 193, 10_000)] == [0, 0, 1, 3, 3]


SOME = [Prediction(name, LABELS[1:3], (1, 2), (0.75, 1.23456789e-9)) for name in ODD]
SOME += [Prediction("broken,\r\n.png", error='no "image"')]


def written(path: Path, form: str, predictions=SOME) -> None:
    with writing(str(path), 2, form) as writer:
        for prediction in predictions:
            writer.write(prediction)


def test_csv__reads_back(tmp_path):
    written(tmp_path / "x.csv", "csv")
    with open(tmp_path / "x.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        header, *rows = [[csv_text(cell) for cell in row] for row in csv.reader(file)]
    assert header == ["file", "class_1", "probability_1", "class_2", "probability_2", "error"]
    good = ["dog, wet", "0.75", 'the "odd" one', "1.23457e-09", ""]
    assert rows == [[name, *good] for name in ODD] + [["broken,\r\n.png", "", "", "", "", 'no "image"']]


@pytest.mark.parametrize("name", ["x.json", "x.JSONL"])
def test_json__reads_back(tmp_path, name):
    written(tmp_path / name, "json")
    text = (tmp_path / name).read_text("ascii")
    found = json.loads(text) if name == "x.json" else [json.loads(line) for line in text.splitlines()]
    values = ((1, "dog, wet", 0.75), (2, 'the "odd" one', 1.23457e-9))
    good = [{"class": label, "index": index, "probability": value} for index, label, value in values]
    assert found[:-1] == [{"file": name, "predictions": good} for name in ODD]
    assert found[-1] == {"file": "broken,\r\n.png", "predictions": [], "error": 'no "image"'}


def test_writers__hand_on_every_image_at_once(tmp_path):
    written(tmp_path / "x.json", "json", [])
    assert json.loads((tmp_path / "x.json").read_text()) == []
    file = io.StringIO()
    for writer in (CsvWriter(file, 2), JsonWriter(file)):
        before = len(file.getvalue())
        writer.write(SOME[0])
        assert len(file.getvalue()) > before


@pytest.mark.parametrize("form", ["csv", "json"])
def test_writing__failure_leaves_what_was_there(tmp_path, form):
    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        with pytest.raises(AttributeError):
            written(tmp_path / name, form, [*SOME, None])
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"


def test_writing__a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    written(tmp_path / "pipe", "csv", SOME[:1])
    assert os.read(reader, 1000).startswith(b"file,class_1") and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_writing__standard_output_keeps_bytes(capfdbinary):
    written(Path("-"), "csv", SOME)
    out = capfdbinary.readouterr().out
    assert b"not \xff unicode.png" in out and "Käfer 虫".encode() in out
    with redirect_stdout(io.StringIO()) as text:
        written(Path("-"), "csv", SOME)
    assert text.getvalue().encode("utf-8", "surrogateescape") == out


def test_summary__keeps_little_of_much():
    summary = Summary(10_000)
    for number in range(10_000):
        found = dict(classes=(f"c{number % 30}",), indices=(number % 30,), probabilities=(1,))
        summary.add(Prediction(f"{number}", **({"error": "bad"} if number % 100 == 0 else found)))
    assert (len(summary.first), len(summary.failures), summary.failed, summary.read) == (20, 20, 100, 9900)
    assert summary.class_table().row_count == 21 and summary.table().row_count == 20
    lines = summary.complaints()
    assert (lines[0], lines[1], lines[-1]) == ("100 of 10,000 images could not be read:", "  0: bad", "  and 80 more")


@pytest.fixture
def ask(capsys, run):
    def call(*argv: str) -> tuple[int, str, str]:
        code = main(["predict", str(run), "--workers", "0", "--device", "cpu", *argv])
        return code, *capsys.readouterr()

    return call


def test_command__table(ask, images):
    code, out, err = ask("1.png", "--top", "2", "3.png", "0.png", "1.png")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1.png", "3.png", "0.png"] and rows[1][1:] == ["-", "-", ""]
    assert rows[0][1] in LABELS and rows[0][3].endswith(" %")
    note = "note: 1 image named more than once, and predicted once: 1.png"
    assert err.splitlines()[:2] == [note, "1 of 3 images could not be read:"]


def test_command__files_and_standard_output_agree(ask, images):
    assert ask(".", "--csv", "all.csv", "--json", "all.jsonl")[0] == 0
    rows = list(csv.DictReader(io.StringIO(Path("all.csv").read_text())))
    records = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [record["file"] for record in records] == [f"./{name}" for name in images]
    for row, record in zip(rows, records, strict=True):
        assert row["error"] == record.get("error", "")
        for rank, found in enumerate(record["predictions"], 1):
            assert (row[f"class_{rank}"], float(row[f"probability_{rank}"])) == (found["class"], found["probability"])
    code, out, _ = ask(".", "--json")
    assert code == 0 and json.loads(out) == records
    code, out, _ = ask(".", "--csv=-")
    assert code == 0 and out == Path("all.csv").read_text()
    for name in ODD:
        os.link("1.png", name)
    code, out, _ = ask(".", "--top", "1")
    assert code == 0 and "[red]x.png" in out and r"not \xff unicode.png" in out and r"line\nbreak.png" in out


def test_command__many_images_in_short(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    for number in range(51):
        noise(number, (8, 8)).save(f"p/{number}.bmp")
    code, out, _ = ask("p", "--top", "1")
    assert code == 0 and "p/19.bmp" in out and "p/20.bmp" not in out
    assert "the first 20 of 51 images; --csv FILE or --json FILE has all of them" in out and "images" in out
    code, out, _ = ask("p", "--csv", "all.csv")
    assert code == 0 and "p/1.bmp" not in out and "images" in out and "written: all.csv" in out


def test_command__a_list_and_none_that_can_be_read(ask, images):
    Path("some.txt").write_text("1.png\n0.png\n")
    code, out, _ = ask("--list", "some.txt", "--json")
    assert code == 0 and [os.path.basename(record["file"]) for record in json.loads(out)] == ["1.png", "0.png"]
    code, _, err = ask("3.png", "6.png", "--csv", "all.csv")
    assert code == 1 and "2 of 2 images could not be read" in err and "6.png: empty file" in err
    assert len(Path("all.csv").read_text().splitlines()) == 3


def test_command__refuses_before_the_model_is_opened(ask, images, monkeypatch):
    monkeypatch.setattr("broadsight.runs.opening.open_classifier", None)  # must not be called
    before = Path("1.png").read_bytes()
    for argv, said in (
        (["gone.png", "0.png"], "no such file or folder: gone.png (1 of 2 given)"),
        ([], "no images given; expected files, folders, quoted patterns, or a --list of files"),
        (["0.png", "--top", "0"], "--top 0; expected 1 or more; see `broadsight predict --help`"),
        (["0.png", "--batch", "0"], "--batch 0; expected 1 or more; see `broadsight predict --help`"),
        (["0.png", "--threads", "0"], "--threads 0; expected 1 or more; see `broadsight predict --help`"),
        (["--csv", "1.png", "0.png"], "--csv 1.png, which is named like an image; put --csv last, or write --csv=FILE"),
        (["0.png", "--csv", "--json"], "--csv and --json both to the terminal; expected different files"),
        (["0.png", "--csv", "x", "--json", "x"], "--csv and --json both to x; expected different files"),
    ):
        assert ask(*argv) == (2, "", f"broadsight: {said}\n")
    code, _, err = ask("0.png", "--csv", "no/where.csv")
    assert code == 2 and "there is no folder" in err
    assert Path("1.png").read_bytes() == before


def test_command__interrupted(ask, images, monkeypatch):
    monkeypatch.setattr(CsvWriter, "write", Mock(side_effect=KeyboardInterrupt))
    assert ask("0.png", "1.png", "--csv", "all.csv") == (130, "", "broadsight: interrupted\n")
    assert sorted(os.listdir()) == sorted(images)


def test_predict__in_half_precision_says_so_and_agrees(run, images, capsys, monkeypatch):
    for kind in ("fp32", "bf16"):
        assert main(["predict", str(run), *images[:3], "--precision", kind, "--json", f"{kind}.json"]) == 0
    assert "computes in bf16" in capsys.readouterr().err
    assert json.loads(Path("bf16.json.settings.json").read_text())["model"]["precision"] == "bf16"
    pairs = zip(*(json.loads(Path(f"{kind}.json").read_text()) for kind in ("fp32", "bf16")), strict=True)
    for single, half in ((one["predictions"], other["predictions"]) for one, other in pairs):
        assert single[0]["class"] == half[0]["class"] and single != half
        assert single[0]["probability"] == pytest.approx(half[0]["probability"], abs=0.1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert main(["predict", str(run), images[0], "--precision", "auto"]) == 0
    assert "computes in fp32 (auto)" in capsys.readouterr().err
    already = open_classifier(run, device="cpu", precision="bf16")
    assert already.precision == "bf16" and already.logits(torch.zeros(1, 3, 32, 32)).dtype == torch.float32
    refused("is open already; give precision", broadsight.predict, already, images[0], precision="fp16")
