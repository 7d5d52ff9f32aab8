"""`broadsight train`: options in any order, one line for every mistake, and nothing left behind by one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from broadsight.cli.main import main
from broadsight.cli.parser import together
from broadsight.options import value_of
from broadsight.report.run import report_run
from broadsight.training import run as training
from broadsight.training.engine import Interrupted, Progress
from broadsight.training.request import Request
from broadsight.training.run import Outcome

from ..training.small_runs import SMALL_POOL, files_in, fill, leave_run, offline_hub, without_drawing

SMALL = {"--model": "test_resnet", "--epochs": "1", "--size": "32", "--batch": "4", "--workers": "0"}
SMALL |= {"--threads": "1", "--device": "cpu"}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run the command in an empty folder: (exit code, stdout, stderr)."""
    without_drawing(monkeypatch)
    offline_hub(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(["train", *argv])
        return code, *capsys.readouterr()

    return call


def outcome(folder: Path) -> Outcome:
    progress = Progress(best=50.0, best_epoch=1, finished=True)
    return Outcome(folder, "test_resnet", progress, parameters=10, seconds=1.0, notes=())


@pytest.fixture
def asked(run, monkeypatch, tmp_path):
    """What a command line asks for, without doing it."""
    requests: list[Request] = []

    def record(request: Request, reporter) -> Outcome:
        assert reporter is report_run
        requests.append(request)
        return outcome(tmp_path / "run")

    monkeypatch.setattr(training, "train", record)

    def call(*argv: str) -> Request:
        code, _, err = run(*argv)
        assert (code, err) == (0, "")
        return requests[-1]

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("data"), a=10, b=10)


# ---- how options are read


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--set a=1 b=2 DATA", ["DATA", "--set", '["a=1", "b=2"]']),
        ("DATA --set a=1 --set b=2", ["DATA", "--set", '["a=1", "b=2"]']),
        ("--set=a=b DATA", ["DATA", "--set", '["a=b"]']),
        ("--set a=-1 --lr 3", ["--lr", "3", "--set", '["a=-1"]']),
        ("--set a=1 --model-args b=2 --set c=3", ["--set", '["a=1", "c=3"]', "--model-args", '["b=2"]']),
        ("--sets a=1 x", ["--sets", "a=1", "x"]),
        ("", []),
    ],
)
def test_together(argv, expected):
    assert together(argv.split(), Request.settings()) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1", 1), ("1.5", 1.5), ("1e-3", 0.001), ("-2E+3", -2000.0), ("1.e-3", 0.001), ("true", True)),
        *(("none", "none"), ("null", None), ("avg", "avg"), ("[1, 2]", [1, 2]), ("a: b: c", "a: b: c")),
        *(("{distill_tokens: 1}", {"distill_tokens": 1}), ("[1", "[1"), ("", None)),
    ],
)
def test_value(text, value):
    found = value_of(text)
    assert found == value and type(found) is type(value)


def test_options__reach_the_request(asked):
    typed = """
        --set lr=1e-3 scale=0.5,1 DATA --set clip_norm=none --epochs 3 --batch 8 --size 64 --compile --pretrained
        --model test_vit --pool map --pool-args groups=2 pool_options={distill_tokens:1} --model-args in_chans=1
        --broadcast cb --broadcast-args branch=both --recipe quick --out X --seed 3 --strict --val V --root R
        --workers 2 --threads 1 --device cpu --processes 1 --log-every 5 --checkpoint-minutes 2.5 --download
    """
    request = asked(*typed.split())
    changes = dict(lr="1e-3", scale="0.5,1", clip_norm="none", epochs=3, batch_size=8, image_size=64)
    assert request.changes == changes | dict(compile=True, pretrained=True)
    assert (request.data, request.model, request.pool, request.broadcast) == ("DATA", "test_vit", "map", "cb")
    assert request.model_args == {"in_chans": 1} and request.broadcast_args == {"branch": "both"}
    assert request.pool_args["groups"] == 2
    assert (request.seed, request.strict, request.val, request.root, request.out) == (3, True, "V", "R", "X")
    assert (request.workers, request.threads, request.device, request.processes) == (2, 1, "cpu", 1)
    assert (request.log_every, request.checkpoint_minutes, request.download) == (5, 2.5, True)


def test_options__none_leaves_everything_open_and_a_file_has_some(asked, tmp_path):
    assert asked() == Request() and asked().command == "broadsight train"
    (tmp_path / "train.yaml").write_text("data: DATA\nepochs: 3\nset: [lr=0.5]\nmodel_args: [in_chans=1]\n")
    request = asked("--config", "train.yaml", "--seed", "2")
    assert (request.data, request.changes, request.seed) == ("DATA", {"epochs": 3, "lr": "0.5"}, 2)
    assert request.model_args == {"in_chans": 1}
    pairs = [f"{key}={value}" for key, value in SMALL_POOL.items()]
    assert asked("DATA", "--pool", "map", "--pool-args", *pairs).pool_args == SMALL_POOL


def test_twin__differs_in_the_pooling_alone(run, monkeypatch, tmp_path):
    asked, reported = [], []

    def record(request: Request, reporter, quiet) -> Outcome:
        asked.append((request, reporter))
        return outcome(tmp_path / "run")

    def write(done, *_) -> Outcome:
        reported.append(len(asked))
        return replace(done, report=Path("page.html"))

    monkeypatch.setattr(training, "_train_one", record)
    monkeypatch.setattr(training, "check_twin", lambda request, twin: None)
    monkeypatch.setattr(training, "write_report", write)
    code, out, err = run("DATA", "--pool", "map", "--pool-args", "groups=2", "--twin", "gap", "--out", "X")
    (first, of_first), (second, of_second) = asked
    assert (code, err) == (0, "") and out
    assert (first.pool, second.pool, second.pool_args) == ("map", "gap", {})
    assert second.out == str(tmp_path / "run" / "twin-gap") and second.data == first.data
    # The first one's report compares the two, so it is written last, and named last
    assert (of_first, of_second, reported) == (None, report_run, [2])
    assert out.splitlines()[-1].startswith("report: page.html")


def test_interrupted__one_line_and_the_code_of_the_signal(run, monkeypatch):
    def stops(*args, **kwargs):
        raise Interrupted("stopped and saved", 15)

    monkeypatch.setattr(training, "train", stops)
    assert run("DATA") == (143, "", "broadsight: stopped and saved\n")


# ---- a run


def test_train__says_what_next(run, data, tmp_path):
    small = [word for pair in SMALL.items() for word in pair]
    code, out, err = run(str(data), *small, "--out", "run", "--set", "warmup_epochs=0", "--model-args", "in_chans=1")
    assert code == 0 and "Traceback" not in err
    assert out.startswith("best top-1 ") and 'timm.create_model("local-dir:run", pretrained=True)' in out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["broadsight"]["command"].startswith(f"broadsight train {data} --model test_resnet")
    assert config["model_args"] == {"in_chans": 1}
    code, out, err = run(str(data), *small, "--out", "run")
    assert (code, out) == (2, "") and "run holds a run of test_resnet already; --resume continues it" in err
    code, _, err = run("--out", "run", "--resume", "--workers", "0", "--seed", "3")
    assert code == 2 and "run holds a run with seed=0, not seed=3; leave that out to continue it" in err
    code, out, err = run("--resume", "--out", "nowhere")
    assert (code, out) == (2, "") and err.startswith("broadsight: there is no run in nowhere to resume")
    assert err.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- mistakes


def bad_data(folder: Path) -> None:
    """Folders that cannot be trained on, and files that are no weights."""
    fill(folder / "one", only=6)
    fill(folder / "loose", a=2)
    for path in (folder / "loose" / "a").iterdir():
        path.rename(folder / "loose" / path.name)
    (folder / "loose" / "a").rmdir()
    nothing = dict.fromkeys(("none/a/notes.txt", "file", "full/thesis.txt", "corrupt.safetensors", "corrupt.pth"), "-")
    configs = {"model/config.json": '{"architecture": "test_resnet"}', "damaged/config.json": "{"}
    for place, content in (nothing | configs).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(content)
    leave_run(folder / "teacher", num_classes=7)
    torch.save({"state_dict": {"a": torch.ones(2)}}, folder / "other.pth")


MISTAKES = yaml.safe_load(Path(__file__).with_name("train_mistakes.yaml").read_text("utf-8"))


@pytest.mark.parametrize(("argv", "code", "message"), MISTAKES, ids=[argv for argv, _, _ in MISTAKES])
def test_mistake__one_line_and_nothing_left(argv, code, message, run, data, tmp_path):
    if message.startswith("device cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bad_data(tmp_path)
    before = files_in(tmp_path)
    given = [str(data) if word == "DATA" else word for word in argv.split() if word != "-"]
    for name, value in SMALL.items():  # first, so that a `--set` at the end is followed by nothing
        if name not in given and not (name == "--batch" and argv.endswith(" -")):
            given = [name, value, *given]
    found, out, err = run(*given)
    assert (found, out) == (code, ""), err
    assert err.startswith("broadsight: ") and err.count("\n") == 1 and message in err
    assert (code == 2) == ("--debug" not in err)
    assert files_in(tmp_path) == before
