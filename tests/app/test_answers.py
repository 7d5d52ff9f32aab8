"""Answers: the same as `predict` gives, in turns timed, and never another's; as HTML, with nothing smuggled in."""

import base64
import io
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from broadsight.app import answers
from broadsight.app.answers import Answer, answer, cards, colour_of, data_uri, image_of, top_classes
from broadsight.app.candidates import Candidate, Candidates
from broadsight.benchmark.timing import Summary
from broadsight.data.sources.unlabelled import find_images
from broadsight.prediction.classification import predict_images
from broadsight.runs.classifier import open_classifier
from broadsight.visual.plots import PALETTE
from tests.report.reading import read
from tests.training.small_runs import leave_run

EVIL = "<img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def runs(tmp_path):
    found = []
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        found.append(Candidate(name, name, True, open_classifier(leave_run(tmp_path / name, num_classes=3)[0])))
    return found


def make_image(seed: int = 0) -> Image.Image:
    torch.manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8).numpy())


def test_answer__the_same_as_predict_and_grey_models_get_grey(runs, tmp_path):
    make_image().save(tmp_path / "a.png")
    found = answer(runs, make_image())
    for one, said in zip(runs, found, strict=True):
        expected = next(predict_images(one.run, find_images([str(tmp_path / "a.png")])[0], top=5))
        assert tuple(name for name, _ in said.top) == expected.classes
        assert [share for _, share in said.top] == pytest.approx(expected.probabilities, abs=1e-6)
        assert sum(share for _, share in said.top) == pytest.approx(1)
    assert [said.name for said in found] == ["one", "two"]
    assert [name for name, _ in top_classes(runs[0].run, torch.tensor([[1.0, 2.0, 2.0]]), 2)] == ["1", "2"]
    classifier = open_classifier(leave_run(tmp_path / "grey", num_classes=2, model_args={"in_chans": 1})[0])
    assert image_of(classifier, make_image()).shape == (1, 1, 32, 32)
    assert len(answer([Candidate("grey", "grey", True, classifier)], make_image())[0].top) == 2


def test_answer__times_are_of_every_round(runs, monkeypatch):
    clock = iter(range(1000))  # every look at it is a second later
    monkeypatch.setattr(answers.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(answers, "SECONDS", 3.5)  # the first passes take one second
    found = answer(runs, make_image())
    assert [(said.rounds, said.latency.median, said.threads) for said in found] == [(3, 1000.0, 1)] * 2


def test_answer__many_at_once_get_their_own(runs):
    candidates, images = Candidates(runs), [make_image(seed) for seed in range(4)]
    alone = [answer(runs, one)[0].top for one in images]
    assert len(set(alone)) == 4

    def ask(place: int) -> bool:
        with candidates.computing:
            return answer(runs, images[place % 4])[0].top == alone[place % 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(12)))


def dense(task: str) -> Candidate:
    run = dict(task=task, classes=("cat", "dog"), top_down=False, skeleton=(), keypoint_threshold=2.0, channels=3)
    run |= dict(device=torch.device("cpu"), title="net", parameters=1)
    return Candidate("net", "net", True, SimpleNamespace(**run))  # ty: ignore[invalid-argument-type]


def test_answer__objects_above_the_threshold_or_shares_of_pixels(monkeypatch):
    found = dict(boxes=torch.tensor([[1.0, 2.0, 21.0, 32.0], [0.0, 0.0, 5.0, 5.0]]))
    found |= dict(labels=torch.tensor([2, 1]), scores=torch.tensor([0.9, 0.3]))
    monkeypatch.setattr(answers, "finder", lambda run: lambda image, boxes: found)
    run = dense("detect")
    said = answer([run], make_image(), threshold=0.5)[0]
    assert (said.rows, said.words) == ((("dog", "0.90", "1, 2", "20 x 30"),), "dog (best 0.90)")
    assert said.drawn is not None and said.drawn.width >= 70
    assert len(answer([run], make_image(), threshold=0.2)[0].rows) == 2
    classes = torch.zeros(50, 70, dtype=torch.int64)
    classes[:25, :35] = 1
    monkeypatch.setattr(answers, "finder", lambda run: lambda image, boxes: classes)
    assert answer([dense("segment")], make_image())[0].rows == (("cat", "75.0 %"), ("dog", "25.0 %"))


def an_answer(**more) -> Answer:
    usual = dict(name="net", task="classify", trained=True, latency=Summary(3.456, 3.0, 0.1), rounds=7, threads=2)
    return Answer(**usual | dict(device="cpu", top=(("crab", 0.75), ("fish", 0.25))) | more)


def tags(html: str) -> list[str]:
    return [element.tag for element in read(html).iter()]


def test_cards__classes_bars_and_time():
    text = cards([an_answer()], ["other", "net"])
    assert re.findall(r"width:([\d.]+)%", text) == ["75.00", "25.00"]
    for words in ("75.0 %", "crab", "3.46 ms", "median of 7 passes in turns, 2 threads", f"--accent:{PALETTE[1]}"):
        assert words in text
    assert "random weights" not in text and "random weights" in cards([an_answer(trained=False)], ["net"])


def test_cards__names_are_text_images_lie_in_the_page_and_colours_go_round():
    def found(words):
        rows = ((words, "0.5", "1, 2", "3 x 4"),)
        seen = an_answer(top=(), task="detect", name=words, words=words, rows=rows, drawn=Image.new("RGB", (8, 8)))
        return tags(cards([an_answer(name=words, top=((words, 0.75), (words, 0.25))), seen], [words]))

    assert found(EVIL) == found("cat")
    head, _, data = data_uri(Image.new("RGB", (2000, 1000), (9, 8, 7))).partition(",")
    assert head == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (900, 450)
    names = [str(number) for number in range(8)]
    assert [colour_of(name, names) for name in names] == [*PALETTE, *PALETTE[:2]]
