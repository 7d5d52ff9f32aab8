"""A run that was killed at any moment and continued ends as if it had never stopped."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from broadsight.cli.main import main
from broadsight.data.seeds import SCHEME
from broadsight.training import checkpoints as state
from broadsight.training import recipes
from broadsight.training.engine import Engine, Failed, Interrupted
from broadsight.training.lock import LOCK
from broadsight.training.objectives.classification import Classification
from broadsight.training.request import Request
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder
from broadsight.weights import writing
from tests.refusals import refused

from . import runs
from .runs import Moments, again, command, everything_in, kill, left_by, resuming, small, wait_for
from .test_checkpoints import FILES
from .test_damage import MUTATIONS

MAP = dict(model="test_resnet", pool="map", pool_args=dict(groups=2, dim=16, pool_options=dict(heads=2)))
KINDS = {
    "plain": dict(),
    "dropout": dict(changes=dict(drop_path=0.3, drop_rate=0.3, layer_decay=0.7, cooldown_epochs=1)),
    "mixing": dict(changes=dict(mixup=0.8, cutmix=1.0, mixup_off_epoch=1)),
    "augment": dict(
        changes=dict(auto_augment="rand-m9-mstd0.5-inc1", erasing=0.7, optimizer="sgd", momentum=0.9)
        | dict(mask_ratio=(0.0, 0.6), mask_patch=5)
    ),
    "average": dict(changes=dict(ema=0.9, ema_warmup=True)),
    "accumulate": dict(broadcast="gate", changes=dict(accumulate=2, repeated_aug=2, drop_path=0.2, mixup=0.5)),
    "bfloat": dict(model="test_resnet", changes=dict(precision="bf16", channels_last=True, ema=0.5)),
    "map": dict(**MAP, changes=dict(loss="bce", smoothing=0.1, schedule="constant", clip_norm="none")),
}


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """The folder of a run of some kind that nobody disturbed."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("whole") / kind
            train(small(images, made[kind], **KINDS[kind]))
        return made[kind]

    return run


def resume(folder, **fields):
    return train(replace(again(folder), resume=True, **fields))


SLOW = ("mixing", "average", "accumulate", "bfloat")
REPEATED = [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else []) for kind in KINDS]


@pytest.mark.parametrize("kind", REPEATED)
def test_killed_three_times__same_result(kind, images, whole, tmp_path):
    passes = KINDS[kind].get("changes", {}).get("accumulate", 1)
    begun = small(images, tmp_path / "begun", checkpoint_minutes=0, **KINDS[kind])
    # In the middle of the second update, when a line of the metrics is half due
    kill(begun, tmp_path / "first", Classification, "step", 2 * passes)
    assert [path.name for path in (tmp_path / "first" / "last").iterdir()] == ["update-000000001"]
    continued = again(tmp_path / "first", checkpoint_minutes=0)
    # While it is evaluated, and in the middle of the second epoch
    second = kill(continued, tmp_path / "second", Classification, "evaluate", after=True, resume=True)
    third = kill(second, tmp_path / "third", Engine, "_log", 2, resume=True)
    outcome = train(replace(third, resume=True))
    assert left_by(outcome.folder) == left_by(whole(kind))


def test_results_differ_where_they_should(whole):
    """Or the comparisons above could not fail."""
    results = [left_by(whole(kind))["model.safetensors"] for kind in KINDS]
    assert len(set(results)) == len(results)


PLACES = {
    "before the first checkpoint": (Classification, "step", 1, False),
    "before the first evaluation": (Classification, "evaluate", 1, False),
    "best weights half written": (writing, "_in_order", 1, False),
    "best weights written, not yet in place": (writing, "file_digest", 1, True),
    "between best weights and metrics": (RunFolder, "keep_best", 1, True),
    "between metrics and checkpoint": (RunFolder, "report_skipped", 1, True),
    "in the first checkpoint": (state, "_checksum", 2, False),
    "between evaluation and checkpoint of the second epoch": (state, "save", 4, False),
    "before the old checkpoint is put away": (state, "_retire", 2, False),
    "while the oldest checkpoint is removed": (shutil, "rmtree", 6, False),
    "after the last checkpoint": (RunFolder, "draw", 3, False),
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_chosen_place(place, images, whole, tmp_path):
    owner, name, call, after = PLACES[place]
    request = small(images, tmp_path / "run", **KINDS["average"])
    kill(request, tmp_path / "left", owner, name, call, after=after)
    resume(tmp_path / "left")
    assert left_by(tmp_path / "left") == left_by(whole("average"))


@pytest.fixture(scope="module")
def moments(images, tmp_path_factory):
    """What was on the disk before each change that a run made there."""
    folder = tmp_path_factory.mktemp("moments")
    request = small(images, folder / "run", checkpoint_minutes=0, **KINDS["average"])
    with Moments(folder / "run", folder / "copies").watch() as found:
        train(request)
    return found


def continue_each(moments, numbers, images, expected, tmp_path):
    for number in numbers:
        name = f"{number}-{moments.causes[number].replace('/', '_')}"
        cut = shutil.copytree(moments.copies[number], tmp_path / name)
        for file in cut.rglob(".*.part"):  # nor need what was being written be whole
            for part in [file] if file.is_file() else sorted(file.iterdir())[-1:]:
                os.truncate(part, part.stat().st_size // 2)
        last = state.newest(cut / "last")
        done = last is not None and state.read_progress(last)["finished"]
        if (cut / "metrics.jsonl").exists() and not done:
            with (cut / "metrics.jsonl").open("a") as metrics:
                metrics.write('{"kind": "upda')
        train(replace(small(images, cut, checkpoint_minutes=0, **KINDS["average"]), resume=True))
        assert left_by(cut) == expected, name
        shutil.rmtree(cut)


def test_killed_before_any_change_on_the_disk__some(moments, images, whole, tmp_path):
    assert len(moments.copies) > 40
    expected = left_by(whole("average"))
    late = len(moments.copies) * 2 // 3  # little is left to do there
    numbers = random.Random(0).sample(range(late, len(moments.copies)), 5)
    continue_each(moments, numbers, images, expected, tmp_path)


@pytest.mark.slow
def test_killed_before_any_change_on_the_disk__all(moments, images, whole, tmp_path):
    continue_each(moments, range(len(moments.copies)), images, left_by(whole("average")), tmp_path)


def test_killed_while_the_folder_is_made(images, moments, tmp_path):
    """Before config.json is there, the folder holds nothing that could not be made again."""
    unmade = [copy for copy in moments.copies if not (copy / "config.json").exists()]
    assert unmade
    for number, copy in enumerate(unmade):
        folder = shutil.copytree(copy, tmp_path / str(number))
        kill(small(images, folder), tmp_path / f"left-{number}", Engine, "fit", resume=True)
        assert (tmp_path / f"left-{number}" / "config.json").exists()


@pytest.mark.parametrize("kind", ["mixing", "augment"])
def test_other_workers__same_result(kind, images, whole, tmp_path):
    request = small(images, tmp_path / "run", **(KINDS[kind] | dict(workers=2, checkpoint_minutes=0)))
    kill(request, tmp_path / "left", Classification, "step", 5)
    resume(tmp_path / "left", workers=0 if kind == "mixing" else 1)
    assert left_by(tmp_path / "left") == left_by(whole(kind))


def test_resume_keeps_the_batch_that_was_asked_for_and_the_threads(images, whole, tmp_path, monkeypatch):
    """The default recipe fits its batch to the data; 8 were asked for, and the folder says so."""
    assert recipes.find("quick").recipe.fit_batch
    fields = {name: value for name, value in runs.QUICK.items() if name != "fit_batch"}
    kill(replace(small(images, tmp_path / "run"), set=fields), tmp_path / "left", Classification, "step", 5)
    train(replace(small(images, tmp_path / "whole"), set=fields))
    resume(tmp_path / "left")
    assert left_by(tmp_path / "left") == left_by(tmp_path / "whole")
    # Other threads add in another order, and the command that a stopped run names has none
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    shutil.copytree(whole("plain"), tmp_path / "plain")
    train(Request(out=str(tmp_path / "plain"), workers=0, resume=True))
    assert torch.get_num_threads() == 1


def test_same_command_again_or_weights_to_begin_from_are_gone__continues(images, whole, tmp_path):
    """Learning from a teacher adds a token to the pooling's own arguments, and JSON writes tuples as lists."""
    kind = MAP | dict(model_args=dict(layers=(1, 1, 1, 1)))
    kind["pool_args"] = dict(groups=2, dim=16, pool_options=dict(heads=2, gram=False))
    kind["changes"] = dict(distill="hard", teacher=str(whole("map")))
    kill(small(images, tmp_path / "run", **kind), tmp_path / "left", Classification, "step", 5)
    assert train(replace(small(images, tmp_path / "left", **kind), resume=True)).progress.finished
    weights = shutil.copy(whole("plain") / "model.safetensors", tmp_path / "weights.safetensors")
    kill(small(images, tmp_path / "begun", init=str(weights)), tmp_path / "gone", Classification, "step", 5)
    os.remove(weights)
    assert resume(tmp_path / "gone").progress.finished


def test_finished__nothing_happens_and_no_checkpoint__from_the_beginning(images, whole, tmp_path, capsys):
    folder = shutil.copytree(whole("plain"), tmp_path / "run")
    asked = resuming(folder)
    before = everything_in(folder)
    assert main([*asked, "--no-report"]) == 0
    assert everything_in(folder) == before
    assert "best top-1" in capsys.readouterr().out
    assert main(asked) == 0 and (folder / "report.html").is_file()  # which was missing
    before = everything_in(folder)
    assert main(asked) == 0
    assert everything_in(folder) == before
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    for name in ("last", "previous"):  # what the message of a damaged checkpoint says
        shutil.rmtree(folder / name)
    resume(folder)
    assert left_by(folder) == left_by(whole("plain"))
    assert "no checkpoint yet: from the beginning" in capsys.readouterr().err


def test_failing_evaluation__nothing_that_was_trained_is_lost(images, whole, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(Failed):
        patch.setattr(Classification, "evaluate", fail)
        train(small(images, tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "last").iterdir()] == ["update-000000003"]
    left = kill(again(tmp_path / "run"), tmp_path / "left", Classification, "step", resume=True)
    assert (tmp_path / "left" / "last" / "update-000000003-evaluated").is_dir()  # evaluated, before another step
    train(replace(left, resume=True))
    assert left_by(tmp_path / "left") == left_by(whole("plain"))


def test_nothing_to_resume(tmp_path, capsys):
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    said = f"there is no run in {tmp_path / 'none'} to resume; leave --resume out to begin one"
    assert capsys.readouterr().err == f"broadsight: {said}\n"
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "fit", lambda self: pytest.fail("a run that nobody described was begun"))
        assert main(["train", "--resume", "--out", str(tmp_path / "empty"), "--workers", "0"]) == 2
    assert list((tmp_path / "empty").iterdir()) == []


OLD = Path(__file__).parents[1] / "runs" / "first_version"


@pytest.mark.parametrize("old", ["classify", "segment", "mine"])
def test_other_seeds__refused_and_untouched(old, whole, tmp_path, capsys):
    """A run that was begun with seeds of another scheme would not continue as it began; the first version's had one."""
    folder = shutil.copytree(whole("plain") if old == "mine" else OLD / old, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    if old == "mine":
        assert config["broadsight"]["settings"].pop("seeds") == SCHEME
        del config["broadsight"]["digest"]
        (folder / "config.json").write_text(json.dumps(config))
    (folder / LOCK).touch()
    capsys.readouterr()  # what the whole run has printed
    refuses_untouched(folder, capsys, f"the run in {folder} was begun by a version that drew other random numbers")


OTHERS = [("model", "test_vit", "test_resnet"), ("pool", None, "gap"), ("broadcast", None, "cb"), ("seed", 0, 1)]
OTHERS += [("recipe", "quick", "finetune"), ("log_every", 2, 3), ("init", None, "elsewhere")]
OTHERS = [({name: other}, f"{name}={here}, not {name}={other}") for name, here, other in OTHERS]
OTHERS += [(dict(model_args=dict(in_chans=1)), "model_args"), (dict(data="scenes:64"), "not data=scenes:64")]
OTHERS += [(dict(set=dict(epochs=3)), "epochs=2, not 3"), (dict(set=dict(lr="0.5")), "lr=0.001, not 0.5")]


def test_another_run__refused_and_untouched(images, whole, capsys):
    folder = whole("plain")
    before = everything_in(folder)
    for fields, message in OTHERS:
        assert "another --out" in refused(f"{folder} .*{message}", resume, folder, **fields)
    capsys.readouterr()
    assert main(["train", str(images), "--out", str(folder)]) == 2  # without --resume
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "holds a run of test_vit already" in said
    assert everything_in(folder) == before


def move(data):
    shutil.copytree(data, data.with_name("new"), copy_function=shutil.copyfile)
    shutil.rmtree(data)
    data.with_name("new").rename(data)


def swap(data):
    for old, new in (("a", "x"), ("b", "a"), ("x", "b")):
        (data / "train" / old).rename(data / "train" / new)


def overwrite(data, first, last=-1):
    """Write the content of another image into some, in the order of their names."""
    files = sorted(data.rglob("*.png"))
    for file in files[first]:
        file.write_bytes(files[last].read_bytes())


NAMES, CONTENT = "the images are not those", r"have their names but not the content that the run in .* was begun with"
CHANGED = {
    "a class": (lambda data: shutil.copytree(data / "train" / "a", data / "train" / "e"), "num_classes=4, not 5"),
    "an image": (lambda data: shutil.copy(data / "train/a/0.png", data / "train/a/new.png"), NAMES),
    "fewer": (lambda data: (data / "train" / "a" / "0.png").unlink(), NAMES),
    "replaced": (lambda data: overwrite(data, slice(None)), CONTENT),
    "one replaced": (lambda data: overwrite(data, slice(1)), CONTENT),
    "swapped": (swap, CONTENT),
    "validation": (lambda data: overwrite(data, slice(-1, None), 0), CONTENT),
    "moved": (move, None),
    "older": (lambda data: None, None),
}


@pytest.mark.parametrize("change", CHANGED)
def test_images__of_other_names_or_content_are_refused_but_may_move(change, images, whole, tmp_path):
    data = shutil.copytree(images, tmp_path / "data", copy_function=shutil.copyfile)
    kill(small(data, tmp_path / "run"), tmp_path / "left", Classification, "step", 5)
    make, message = CHANGED[change]
    make(data)
    if message is not None:
        before = everything_in(tmp_path / "left")
        refused(message, resume, tmp_path / "left")
        assert everything_in(tmp_path / "left") == before
        return
    if change == "older":  # without what later versions compare
        config = tmp_path / "left" / "config.json"
        content = json.loads(config.read_text())
        del content["broadsight"]["digest"], content["broadsight"]["data"]["contents"]
        config.write_text(json.dumps(content))
    notes = resume(tmp_path / "left").notes
    assert any("only names and classes of its images are checked" in note for note in notes) == (change == "older")
    one, other = (load_file(folder / "model.safetensors") for folder in (whole("plain"), tmp_path / "left"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def begun(images, tmp_path_factory):
    """A run with a checkpoint that has every file."""
    folder = tmp_path_factory.mktemp("begun")
    kill(small(images, folder / "run", **KINDS["average"]), folder / "left", Classification, "step", 5)
    return folder / "left"


DAMAGES = [(name, "cut") for name in FILES]
DAMAGES += [("model.safetensors", "flipped"), ("progress.json", "deleted"), ("manifest.json", "emptied")]


def damaged(begun, folder, name, kind, *places):
    """A copy of a run, with a file of these checkpoints damaged."""
    shutil.copytree(begun, folder)
    for place in places:
        (checkpoint,) = (folder / place).iterdir()
        MUTATIONS[kind](checkpoint / name, random.Random(0))
    return folder


@pytest.mark.parametrize(("name", "kind"), DAMAGES)
def test_damaged_checkpoints__one_line_and_untouched(name, kind, begun, tmp_path, capsys):
    """As test_checkpoints does it for all of them, through the command; of both checkpoints."""
    folder = damaged(begun, tmp_path / "run", name, kind, "last", "previous")
    advice = "remove the folders `last` and `previous` to train from the beginning"
    refuses_untouched(folder, capsys, "is damaged", advice)


@pytest.mark.parametrize(("name", "kind"), [DAMAGES[0], *DAMAGES[-3:-1]])
def test_damaged_checkpoint__the_one_before_does(name, kind, begun, whole, tmp_path, capsys):
    folder = damaged(begun, tmp_path / "run", name, kind, "last")
    notes = resume(folder).notes
    said = "checkpoint update-000000003-evaluated was damaged: going on from update-000000003"
    assert said in notes and f"note: {said}" in capsys.readouterr().err
    assert left_by(folder) == left_by(whole("average"))


@pytest.mark.parametrize("text", ["", '{"broadsight": ', "[]", "{}", "null", '{"broadsight": {"settings": {}}}'])
def test_damaged_config__one_line_and_untouched(text, begun, tmp_path, capsys):
    folder = shutil.copytree(begun, tmp_path / "run")
    (folder / "config.json").write_text(text)
    refuses_untouched(folder, capsys, str(folder))


def refuses_untouched(folder, capsys, *texts):
    before = everything_in(folder)
    code = main(resuming(folder))
    assert code in (1, 2)
    assert everything_in(folder) == before
    said = capsys.readouterr().err
    assert said.startswith("broadsight: ") and said.count("\n") == 1 and "Traceback" not in said
    assert all(text in said for text in texts), said


def test_foreign_folder_or_file__refused_and_untouched(images, tmp_path, capsys):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("one")
    before = everything_in(folder)
    asked = command(images, folder)
    for more in ([], ["--resume"]):
        assert main(asked + more) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{folder} exists and holds no run; choose another --out" in said
        assert everything_in(folder) == before
    (folder / "config.json").write_text('{"architecture": "resnet50"}')  # a model, such as one from a hub
    before = everything_in(folder)
    assert main([*asked, "--resume"]) == 2
    assert "no run of broadsight" in capsys.readouterr().err
    assert everything_in(folder) == before
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        assert main(command(images, out)) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(out) in said and "choose another --out" in said
    assert file.read_text() == "mine"


STOPS = [(signal.SIGTERM, "step", 2, "update 2"), (signal.SIGINT, "step", 4, "epoch 2, update 4")]
STOPS += [(signal.SIGINT, "step", 3, "epoch 1, update 3")]
STOPS += [(signal.SIGTERM, "_readable", 4, "epoch 1, update 3")]  # the first batch of an evaluation


@pytest.mark.parametrize(("number", "place", "call", "moment"), STOPS)
def test_asked_to_stop__saves_and_continues(number, place, call, moment, images, whole, tmp_path):
    folder = tmp_path / "my run"
    own, calls = getattr(Classification, place), []

    def asking(self, *args):
        calls.append(place)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return own(self, *args)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted) as stop:
        patch.setattr(Classification, place, asking)
        train(small(images, folder, **KINDS["average"]))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert stop.value.code == 128 + number
    assert moment in str(stop.value) and "\n" not in str(stop.value)
    resume(folder)
    assert left_by(folder) == left_by(whole("average"))


def test_stopped__names_a_command_that_can_be_typed_and_a_second_interrupt_stops_at_once(
    images, tmp_path, monkeypatch, capsys
):
    folder, own = tmp_path / "my run", Classification.step
    monkeypatch.setattr(Classification, "step", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), own(*args))[1])
    assert main(command(images, folder)) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("broadsight: stopped in epoch 1, update 1 and saved; continue with: broadsight train ")
    typed = shlex.split(said.partition("continue with: ")[2])
    assert typed[:2] == ["broadsight", "train"] and "--resume" in typed
    assert typed[typed.index("--out") + 1] == str(folder)

    def asking(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

    monkeypatch.setattr(Classification, "step", asking)
    with pytest.raises(KeyboardInterrupt):
        train(small(images, tmp_path / "run"))
    assert list((tmp_path / "run" / "last").iterdir()) == []


def commanded(argv, said):
    """In a process of its own: a command, whose errors are written down."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(main(argv))


def started(argv, folder, said):
    """A process that trains, once it has written metrics."""
    process = runs.new_processes().Process(target=commanded, args=(argv, said))
    process.start()
    wait_for((folder / "metrics.jsonl").exists)
    return process


def options(images, folder, workers):
    changes = "--set warmup_epochs=1 epochs=4 batch_size=8 fit_batch=False ema=0.9"
    return command(images, folder, f"--log-every 2 --checkpoint-minutes 0 --workers {workers} {changes}")


@pytest.fixture(scope="module")
def four_epochs(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four") / "run"
    assert main(options(images, folder, 0)) == 0
    return left_by(folder)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_process_killed__same_result(workers, four_epochs, images, tmp_path):
    folder = tmp_path / "run"
    argv, delay = options(images, folder, workers), random.uniform(0, 0.5)
    process = started(argv, folder, tmp_path / "said")
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert main([*argv, "--resume"]) == 0
    assert left_by(folder) == four_epochs, f"killed after {delay} s"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_process_asked_to_stop__same_result(number, four_epochs, images, tmp_path):
    folder = tmp_path / "run"
    process = started(options(images, folder, 1), folder, tmp_path / "said")
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1].endswith(f"and saved; continue with: broadsight train --resume --out {folder}")
    assert main(resuming(folder)) == 0
    assert left_by(folder) == four_epochs


@pytest.mark.slow
def test_command_asked_to_stop__same_result(four_epochs, images, tmp_path):
    folder = tmp_path / "run"
    asked = [sys.executable, "-m", "broadsight", *options(images, folder, 2)]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for((folder / "metrics.jsonl").exists)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the workers get it too
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said and "continue with: broadsight train --resume" in said
    assert main(resuming(folder)) == 0
    assert left_by(folder) == four_epochs
