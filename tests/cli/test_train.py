"""`broadsight train`: options in any order, one line for every mistake, and nothing left behind by one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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


# What is typed, the exit code, and part of the line; a "-" at the end: without the batch that all others have.
MISTAKES = [
    # data
    ("no/such/folder", 2, "no such data: no/such/folder"),
    ("scnes", 2, "no such data: scnes; did you mean scenes?"),
    ("none", 2, "no images in none; expected folders named after classes"),
    ("one", 2, "one has one class only, 'only'; a classifier needs two"),
    ("loose", 2, "loose holds 2 images but no class folders; put the images of each class into a folder"),
    ("file", 2, "file is neither a folder, a tar"),
    ("DATA --split 2", 2, "split=2.0 is not between 0 and 1"),
    ("DATA --split 0.5 --val DATA", 2, "split=0.5 and val="),
    ("DATA --val nowhere", 2, "no such val: nowhere"),
    ("scenes:x", 2, "'scenes:x': 'x' is not a count"),
    # model
    ("DATA --model test_resne", 2, "unknown model 'test_resne'; nearest: test_resnet"),
    ("DATA --pool mpa", 2, "unknown pool 'mpa'; did you mean 'map'?"),
    ("DATA --broadcast scald", 2, "unknown kind 'scald'; did you mean 'scaled'?"),
    ("DATA --model test_resnet --broadcast cb", 2, "ResNet"),
    ("DATA --model-args bananas=3", 2, "test_resnet cannot be created: "),
    ("DATA --pool map --pool-args grops=3", 2, "did you mean 'groups'"),
    ("DATA --pool-args groups=3", 2, "--pool-args"),
    ("DATA --broadcast-args branch=both", 2, "--broadcast-args"),
    ("DATA --model-args in_chans=2", 2, "--model-args in_chans=2; images have 1 channel (grey) or 3 (RGB)"),
    ("DATA --model-args in_chans=many", 2, "in_chans=many"),
    ("DATA --pretrained", 1, "the pretrained weights of test_resnet cannot be had: "),
    ("DATA --init nowhere", 2, "nowhere is not a file"),
    ("DATA --init full", 2, "full holds no model.safetensors; give a run folder or a file of weights"),
    ("DATA --init corrupt.safetensors", 1, "corrupt.safetensors is not a readable safetensors file"),
    ("DATA --init corrupt.pth", 1, "corrupt.pth cannot be loaded as a file of tensors only"),
    ("DATA --init other.pth", 2, "other.pth holds weights of another model: "),
    # recipe
    ("DATA --recipe quik", 2, "unknown recipe 'quik'; did you mean 'quick'?"),
    ("DATA --set epocs=3", 2, "unknown recipe field 'epocs'; did you mean 'epochs'?"),
    ("DATA --set lr=fast", 2, "lr=fast; expected a number"),
    ("DATA --set fit_batch=maybe", 2, "fit_batch=maybe; expected true or false"),
    ("DATA --set drop_path=2", 2, "drop_path=2.0; expected"),
    ("DATA --set epochs=3", 2, "epochs given twice, as 1 and by --set epochs=3; expected one of them"),
    ("DATA --set lr=1 lr=2", 2, "lr"),
    ("DATA --set", 2, "--set is followed by nothing; expected key=value, such as --set epochs=10"),
    ("DATA --set --strict", 2, "--set is followed by '--strict'; expected key=value"),
    ("--set DATA", 2, "--set is followed by "),
    ("DATA --set =3", 2, "--set '=3'; expected key=value, such as --set epochs=10"),
    ("DATA --set=lr", 2, "--set 'lr'; expected key=value"),
    ("DATA --set accumulate=3", 2, "batch_size=4 does not divide into accumulate=3 equal passes"),
    ("DATA --set batch_size=19 -", 2, "batch_size=19 does not fit: there are 18 training images; take --set"),
    ("DATA --set batch_size=3 mixup=0.5 -", 2, "mixup and cutmix pair the images of a pass, of which there are 3"),
    ("DATA --set optimizer=adamx", 2, "unknown optimizer 'adamx'; did you mean 'adamax'?"),
    ("DATA --set auto_augment=nonsense", 2, "auto_augment=nonsense; expected"),
    ("DATA --set precision=fp16", 2, "precision=fp16 needs a GPU; use precision=bf16 or fp32"),
    ("DATA --set distill=hard", 2, "distill=hard without a teacher"),
    ("DATA --set distill=hard teacher=test_resne", 2, "teacher 'test_resne' is neither a model of timm nor a run"),
    ("DATA --set distill=hard teacher=full", 2, "teacher folder full has no config.json"),
    ("DATA --set distill=hard teacher=teacher", 2, "teacher 'teacher' knows 7 classes, the data has 2"),
    ("DATA --set distill=hard teacher=test_vit", 2, "the weights of teacher 'test_vit' cannot be loaded: "),
    # run
    ("DATA --resume", 2, "--resume needs --out, the folder of the run to continue"),
    ("DATA --resume --out file", 2, "file exists and holds no run"),
    ("DATA --resume --out model", 2, "model holds a model, but no run of broadsight to continue"),
    ("DATA --resume --out damaged", 2, "damaged/config.json is damaged"),
    ("DATA --out file", 2, "file exists and holds no run; choose another --out"),
    ("DATA --out full", 2, "full exists and holds no run; choose another --out"),
    ("DATA --out file/below", 2, "file"),
    ("DATA --device cuda", 2, "device cuda asked for, but torch sees no GPU here; use --device cpu or auto"),
    ("DATA --device tpu", 2, "--device: expected one of 'auto', 'cpu', 'cuda', got tpu"),
    ("DATA --processes 2", 2, "2 processes asked for, 1 running; start them with: torchrun --standalone"),
    ("DATA --task detect", 2, "holds no labelled images; expected a COCO JSON file beside its images"),
    ("DATA --task paint", 2, "--task: expected one of 'classify'"),
    ("DATA --workers -1", 2, "--workers -1; expected"),
    ("DATA --threads -1", 2, "--threads -1; expected"),
    ("DATA --epochs many", 2, "--epochs: expected"),
    ("DATA --bacth 4", 2, "unrecognized arguments: --bacth"),
]


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
