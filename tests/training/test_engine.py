"""The loop of training: what it computes, what it keeps, and how it ends."""

import errno
import json
import math
import resource
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn

from broadsight.cli.main import main
from broadsight.training import checkpoints as state
from broadsight.training import processes, run_folder
from broadsight.training.display import Display
from broadsight.training.engine import Engine, Failed, total_images
from broadsight.training.objectives.classification import Classification
from broadsight.training.objectives.objective import Step, Work
from broadsight.training.optimisation import make_average, make_optimizer, make_scheduler
from broadsight.training.recipes import Recipe
from broadsight.training.run import train
from broadsight.training.run_folder import RunFolder

from .runs import again, command, kill, left_by, lines_of, small

PLAIN = Recipe(optimizer="momentum", momentum=0.0, lr=0.1, schedule="constant", warmup_epochs=0, epochs=2)
PLAIN = replace(PLAIN, weight_decay=0.0)


class Points(list):
    """A batch: numbers of points."""

    keys = property(tuple)
    skipped = property(lambda self: {"point 7": "blurred"} if 7 in self else {})


class Fitting(Work):
    """Fits a line with a norm to points; the loss is the mean squared error, the goals are given in advance."""

    goal, counts_correct = "val_top1", True

    def __init__(self, model, accumulate=1, goals=(10.0, 20.0, 30.0, 40.0, 50.0, 60.0)):
        self.model, self.accumulate, self.goals = model, accumulate, iter(goals)
        self.updates, self.batch, self.evaluations = 3, 4, 4
        self.points = torch.randn(self.updates * self.batch, 2, generator=torch.Generator().manual_seed(1))
        self.begun, self.losses, self.evaluated, self.modes = [], [], [], []
        self.bad = None

    def begin_epoch(self, epoch, first):
        self.begun.append((epoch, first))
        self.place = first * self.accumulate

    def next_batch(self):
        size = self.batch // self.accumulate
        self.place += 1
        return Points(range((self.place - 1) * size, self.place * size))

    def step(self, batch):
        self.modes.append(self.model.training)
        x = self.points[list(batch)]
        output = self.model(x).squeeze(1)
        loss = (output - x[:, 0]).square().mean()
        if self.bad is not None and self.bad in batch:
            loss = loss * math.nan
        self.losses.append(loss.item())
        return Step(loss, len(batch), (output > 0).sum())

    def names(self, keys):
        return [f"point {index}" for index in keys]

    def evaluate(self, model, seen):
        self.evaluated.append({name: value.clone() for name, value in model.state_dict().items()})
        seen(4)
        return {"val_loss": 1.0, "val_top1": next(self.goals)}, {"image": "torn"}


def engine_for(folder, recipe=PLAIN, **options):
    torch.manual_seed(0)
    accelerator = processes.connect("cpu")
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    average, optimizer = make_average(model, recipe), make_optimizer(model, recipe)
    work = Fitting(model, recipe.accumulate, options.pop("goals", (10.0, 20.0, 30.0, 40.0)))
    work.stays_in_eval = recipe.frozen_stats
    scheduler = make_scheduler(optimizer, recipe, work.updates)
    prepared, stepping = accelerator.prepare(model, optimizer)
    run = RunFolder(folder)
    run.create({})
    display = Display(0, total_images(work, recipe.epochs), plain=True)
    options = dict(log_every=2) | options
    return Engine(accelerator, work, prepared, model, stepping, scheduler, average, recipe, run, display, **options)


def lines(engine, kind):
    return lines_of(engine.folder.path, kind)


def best_weights(engine):
    return load_file(engine.folder.path / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_metrics__means_of_the_losses(tmp_path):
    engine = engine_for(tmp_path)
    progress, losses = engine.fit(), engine.work.losses
    assert len(losses) == 6
    expected = [sum(losses[:2]) / 2, losses[2], losses[3], sum(losses[4:]) / 2]
    assert [line["loss"] for line in lines(engine, "updates")] == pytest.approx(expected, rel=1e-6)
    places = [(line["updates"], line["epoch"], line["lr"]) for line in lines(engine, "updates")]
    assert places == [(2, 1, 0.1), (3, 1, 0.1), (4, 2, 0.1), (6, 2, 0.1)]
    first, second = lines(engine, "epoch")
    assert first["train_loss"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-6)
    assert second["train_loss"] == pytest.approx(sum(losses[3:]) / 3, rel=1e-6)
    assert 0 <= first["train_top1"] <= 100 and first["val_loss"] == 1.0
    assert (second["val_top1"], second["best"], second["best_epoch"], second["updates"]) == (20.0, 20.0, 2, 6)
    assert progress.finished and (progress.epoch, progress.updates) == (2, 6)
    assert progress.skipped == {"point 7": "blurred", "image": "torn"} and second["skipped"] == 2
    assert json.loads((tmp_path / "skipped.json").read_text()) == progress.skipped
    assert engine.work.begun == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "goals, best, kept",
    [
        ((None, None, None), (None, 0), 2),  # nothing to be compared by: the last one's weights
        ((math.nan, math.nan, math.nan), (None, 0), 2),
        ((math.nan, 0.0, None), (0.0, 2), 1),  # nan never wins, and never locks; 0 is a value
        ((math.inf, 5.0, 5.0), (5.0, 2), 1),  # of equals the first
        ((5.0, math.nan, 7.0), (7.0, 3), 2),
        ((10.0, 30.0, 30.0, 20.0), (30.0, 2), 1),
    ],
)
def test_best__figures_that_are_missing_are_never_chosen(tmp_path, goals, best, kept):
    engine = engine_for(tmp_path, replace(PLAIN, epochs=len(goals)), goals=goals)
    progress = engine.fit()
    assert (progress.best, progress.best_epoch) == best
    assert progress.stale == (len(goals) - best[1] if best[1] else 0)
    assert equal(best_weights(engine), engine.work.evaluated[kept])
    written = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in written and "Infinity" not in written
    shown = [line["val_top1"] for line in lines(engine, "epoch")]
    assert shown == [goal if goal is not None and math.isfinite(goal) else None for goal in goals]


def test_best__not_where_epochs_cannot_be_compared_nor_without_a_figure(tmp_path):
    engine = engine_for(tmp_path / "whole")
    engine.work.comparable = False
    assert engine.fit().best is None and equal(best_weights(engine), engine.work.evaluated[-1])
    assert [(line["val_top1"], line["best"]) for line in lines(engine, "epoch")] == [(10.0, None), (20.0, None)]
    engine_for(tmp_path / "run", replace(PLAIN, epochs=1), goals=[None]).fit()
    engine = engine_for(tmp_path / "run", goals=[3.0])
    assert engine.resume()
    engine.progress.finished = False
    assert engine.fit().best == 3.0


def test_update__plain_gradient_descent_or_the_mean_of_passes(tmp_path):
    recipe = replace(PLAIN, epochs=1)
    engine, other = engine_for(tmp_path / "a", recipe), engine_for(tmp_path / "b", recipe)
    engine.fit()
    work, model = other.work, other.plain
    work.begin_epoch(0, 0)
    for _ in range(3):
        loss = work.step(work.next_batch()).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    for one, two in zip(engine.plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    # Without BatchNorm's statistics, an update from two passes is that of both batches at once
    frozen = replace(PLAIN, frozen_stats=True, epochs=1)
    one, two = engine_for(tmp_path / "c", frozen), engine_for(tmp_path / "d", replace(frozen, accumulate=2))
    one.fit(), two.fit()
    assert len(two.work.losses) == 2 * len(one.work.losses) == 6
    for first, second in zip(one.plain.parameters(), two.plain.parameters(), strict=True):
        torch.testing.assert_close(first, second)
    losses = [[line["loss"] for line in lines(engine, "updates")] for engine in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_clip_norm_and_schedule(tmp_path):
    engine = engine_for(tmp_path / "clipped", replace(PLAIN, clip_norm=1e-3, epochs=1))
    before = [parameter.detach().clone() for parameter in engine.plain.parameters()]
    engine.fit()
    moved = [(now.detach() - then).square().sum() for now, then in zip(engine.plain.parameters(), before, strict=True)]
    assert 0 < float(sum(moved).sqrt()) <= 3 * 0.1 * 1e-3 * 1.001
    recipe = replace(PLAIN, schedule="cosine", epochs=4, warmup_epochs=1, warmup_lr=0.01, min_lr=0.02)
    engine = engine_for(tmp_path, recipe, log_every=1)
    engine.fit()
    rates = [line["lr"] for line in lines(engine, "updates")]
    assert rates[:3] == pytest.approx([0.01, 0.04, 0.07])
    expected = [0.02 + 0.5 * 0.08 * (1 + math.cos(math.pi * update / 12)) for update in range(3, 12)]
    assert rates[3:] == pytest.approx(expected)


def test_average__is_evaluated_and_kept(tmp_path):
    engine = engine_for(tmp_path, replace(PLAIN, ema=0.5))
    trained, step = [], engine.optimizer.step

    def follow():
        step()
        trained.append({name: value.clone() for name, value in engine.plain.state_dict().items()})

    engine.optimizer.step = follow
    engine.fit()
    # By hand: the first update is taken whole, later ones by half; counters are copied
    average = trained[0]
    for weights in trained[1:]:
        for name, value in weights.items():
            average[name] = (average[name] + value) / 2 if value.dtype.is_floating_point else value
    assert not equal(best_weights(engine), engine.plain.state_dict())
    assert equal(best_weights(engine), engine.work.evaluated[-1])
    (checkpoint,) = (tmp_path / "last").iterdir()
    assert equal(load_file(checkpoint / "ema.safetensors"), engine.work.evaluated[-1])
    assert equal(load_file(checkpoint / "model.safetensors"), dict(engine.plain.state_dict()))
    for name, value in best_weights(engine).items():
        torch.testing.assert_close(value, average[name])


def test_patience__ends_early(tmp_path):
    recipe = replace(PLAIN, epochs=6, patience=2)
    progress = engine_for(tmp_path / "a", recipe, goals=(10.0, 30.0, 20.0, 30.0, 90.0, 90.0)).fit()
    assert progress.finished and progress.epoch == 4
    continued = engine_for(tmp_path / "a", recipe, goals=())
    assert continued.resume() and continued.fit().epoch == 4
    assert continued.work.begun == []
    # Counted over a resume
    with pytest.raises(StopIteration):
        engine_for(tmp_path / "b", recipe, goals=(10.0, 5.0)).fit()
    second = engine_for(tmp_path / "b", recipe, goals=(5.0, 90.0))
    assert second.resume() and second.fit().epoch == 3
    # But not in epochs without a figure
    recipe = replace(PLAIN, epochs=4, patience=1)
    assert engine_for(tmp_path / "c", recipe, goals=[None] * 4).fit().epoch == 4
    assert engine_for(tmp_path / "d", recipe, goals=[None, 5.0, None, 9.0]).fit().epoch == 3


def test_frozen_stats__keeps_the_statistics(images, tmp_path):
    for frozen in (True, False):
        engine = engine_for(tmp_path / str(frozen), replace(PLAIN, frozen_stats=frozen))
        before = engine.plain[0].weight.detach().clone()
        engine.fit()
        assert set(engine.work.modes) == {not frozen} and not torch.equal(engine.plain[0].weight, before)
        norm = engine.plain[1]
        assert (torch.equal(norm.running_mean, torch.zeros(4)) and norm.num_batches_tracked == 0) == frozen
    # Of a real model, with random interpolation
    changes = dict(frozen_stats=True, epochs=1, interpolation="random")
    assert train(small(images, tmp_path / "run", model="test_resnet", changes=changes)).progress.finished
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(not value.any() for name, value in weights.items() if name.endswith("running_mean"))
    assert any(name.endswith("running_mean") for name in weights)


def test_resume__sums_and_place(tmp_path):
    engine_for(tmp_path / "whole", checkpoint_minutes=10).fit()
    engine = engine_for(tmp_path / "run", checkpoint_minutes=0)
    update, stops = engine._update, iter([False] * 4)
    engine._update = lambda batches: next(stops) or update(batches)
    with pytest.raises(StopIteration):
        engine.fit()
    resumed = engine_for(tmp_path / "run", goals=(20.0,))
    assert resumed.resume()
    assert (resumed.progress.epoch, resumed.progress.update, resumed.progress.updates) == (1, 1, 4)
    resumed.fit()
    assert resumed.work.begun == [(1, 1)]
    assert left_by(tmp_path / "run") == left_by(tmp_path / "whole")


def test_loss_is_no_number__batch_named(tmp_path):
    engine = engine_for(tmp_path, replace(PLAIN, epochs=3))
    step, bad = engine.work.step, iter([None, None, None, 2])

    def second_epoch(batch):
        engine.work.bad = next(bad)
        return step(batch)

    engine.work.step = second_epoch
    said = "the loss is nan in epoch 2, about update 4, for the batch point 0, point 1"
    with pytest.raises(Failed, match=said) as end:
        engine.fit()
    assert "last/update-000000003-evaluated, is whole: --resume continues from it" in str(end.value)
    assert json.loads((tmp_path / "bad_batch.json").read_text()) == [f"point {index}" for index in range(4)]
    assert "\n" not in str(end.value)
    continued = engine_for(tmp_path, replace(PLAIN, epochs=3), goals=(20.0, 30.0))
    assert continued.resume() and continued.progress.epoch == 1
    assert all(torch.isfinite(value).all() for value in continued.plain.state_dict().values())
    assert continued.fit().finished


def test_loss_or_weights_are_no_numbers__never_in_a_checkpoint(tmp_path):
    """Not even in one that is due before the losses are looked at; a gradient can overflow where the loss does not."""
    engine = engine_for(tmp_path / "loss", log_every=100, checkpoint_minutes=0)
    engine.work.bad = 5
    with pytest.raises(Failed, match="the loss is nan in epoch 1, about update 2"):
        engine.fit()
    assert [path.name for path in (tmp_path / "loss" / "last").iterdir()] == ["update-000000001"]
    engine = engine_for(tmp_path / "weights", checkpoint_minutes=0)
    step, calls = engine.optimizer.step, []

    def overflow():
        calls.append(1)
        if len(calls) == 3:
            engine.plain[0].weight.grad[0, 0] = math.inf
        step()

    engine.optimizer.step = overflow
    with pytest.raises(Failed, match="the weights are no numbers any more"):
        engine.fit()
    checkpoint = state.newest(tmp_path / "weights" / "last")
    assert all(torch.isfinite(value).all() for value in load_file(checkpoint / "model.safetensors").values())


def test_loss_is_no_number__command(images, tmp_path, monkeypatch, capsys):
    step, calls = Classification.step, []

    def bad(self, batch):
        calls.append([self.order.source.name(index) for _, _, index in batch.keys])
        result = step(self, batch)
        return result._replace(loss=result.loss * math.nan) if len(calls) == 5 else result

    monkeypatch.setattr(Classification, "step", bad)
    argv = command(images, tmp_path / "run", "--batch 8 --epochs 2 --log-every 2")
    assert main(argv) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("broadsight: the loss is nan in epoch 2, about update 6, for the batch ")
    assert calls[4][0] in said and "and 4 more (all of them: bad_batch.json)" in said
    assert json.loads((tmp_path / "run" / "bad_batch.json").read_text()) == calls[4]
    monkeypatch.undo()
    assert main([*argv, "--resume"]) == 0


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


WRITERS = {"best weights": (run_folder, "write_weights"), "weights of a checkpoint": (state, "flush")}
WRITERS |= {"metrics": (RunFolder, "record"), "skipped": (RunFolder, "report_skipped")}
WRITERS |= {"curves": (run_folder, "draw_curves"), "renaming": (type(state.Path()), "rename")}


@pytest.mark.parametrize("writer", WRITERS)
def test_full_disk__one_line(writer, tmp_path, monkeypatch):
    """Of a whole epoch that was saved, everything stays."""
    goals = (10.0, 20.0)
    whole = engine_for(tmp_path / "whole", goals=goals)
    whole.fit()
    engine = engine_for(tmp_path / "run", goals=goals)
    save = engine.save

    def save_and_fill():
        save()
        if engine.progress.evaluated:
            monkeypatch.setattr(*WRITERS[writer], no_space)
            monkeypatch.setattr(engine, "save", save)
            engine.folder._drawn = -math.inf

    monkeypatch.setattr(engine, "save", save_and_fill)
    with pytest.raises(Failed) as end:
        engine.fit()
    monkeypatch.undo()
    expected = f"cannot write to {tmp_path / 'run'}: No space left on device; the last checkpoint, "
    # Whether the second epoch was saved before it was evaluated
    learned = writer not in ("weights of a checkpoint", "renaming", "metrics")
    name = "update-000000006" if learned else "update-000000003-evaluated"
    assert str(end.value).startswith(f"{expected}last/{name}, is whole")
    checkpoint, before = state.checkpoints(tmp_path / "run" / "last", tmp_path / "run" / "previous")
    assert [state.read_progress(one)["epoch"] for one in (checkpoint, before)] == [1, int(learned)]
    resumed = engine_for(tmp_path / "run", goals=goals[1:])
    assert resumed.resume()
    resumed.fit()
    assert left_by(tmp_path / "run") == left_by(tmp_path / "whole")


@pytest.mark.parametrize("size", [100_000, 1_500_000])
def test_full_disk__real(size, images, tmp_path, capsys):
    """Nothing of the model fits, and all of it but not the optimiser's moments. (`capsys` captures in no file.)"""
    request = small(images, tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # no process of ours can write beyond that
    try:
        with pytest.raises(Failed, match="cannot write to") as end:
            train(request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(end.value) and "no checkpoint had been written" in str(end.value)
    assert [path.name for path in (tmp_path / "run").rglob(".*")] == [".lock"]
    assert list((tmp_path / "run" / "last").iterdir()) == []
    assert train(replace(again(tmp_path / "run"), resume=True)).progress.finished


@pytest.mark.parametrize("method", ["write", "flush"])
@pytest.mark.parametrize("begun", [False, True])
def test_full_disk__events_too(begun, method, tmp_path, monkeypatch):
    """TensorBoard's writer is a thread, which must neither hide the reason nor print a page of its own."""
    engine, printed = engine_for(tmp_path), []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    evaluate = engine.work.evaluate

    def fill(*args):
        monkeypatch.setattr(RecordWriter, method, no_space)
        return evaluate(*args)

    engine.work.evaluate = fill
    if not begun:
        monkeypatch.setattr(RecordWriter, method, no_space)
    with pytest.raises(Failed, match=r"cannot write to .*: No space left on device; "):
        engine.fit()
    assert not printed


def test_folder_cannot_be_made_or_became_read_only(images, tmp_path, monkeypatch, capsys):
    refusal = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run"))
    monkeypatch.setattr(state.Path, "mkdir", Mock(side_effect=refusal))
    assert main(command(images, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert said == f"broadsight: cannot write to {tmp_path / 'run'}: Permission denied; choose another --out\n"
    monkeypatch.undo()
    left = kill(small(images, tmp_path / "run"), tmp_path / "left", Classification, "step", 5)
    opened = state.Path.open

    def refuse(path, mode="r", *rest, **kwargs):
        if "metrics" in path.name and mode not in ("r", "rb"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *rest, **kwargs)

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(Failed, match=r"cannot write to .*: Permission denied"):
        train(replace(left, resume=True))


def test_memory__advice_and_other_errors_stay_what_they_are(tmp_path):
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()):
        engine = engine_for(tmp_path)
        engine.work.step = Mock(side_effect=error)
        with pytest.raises(Failed, match="a batch of 4 images does not fit into the memory of cpu") as end:
            engine.fit()
        assert "--set accumulate=2 " in str(end.value) and "no checkpoint had been written" in str(end.value)
    engine = engine_for(tmp_path)
    engine.work.step = lambda batch: torch.zeros(2, 3) @ torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as end:
        engine.fit()
    assert not isinstance(end.value, Failed)


def test_in_a_thread__no_signals_and_batches_are_not_kept(tmp_path):
    """Where Python takes no handlers for signals. The display counts all that is done."""
    engine = engine_for(tmp_path)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(engine.fit).result().finished
    assert engine.display.done == pytest.approx(engine.display.total) == pytest.approx(2 * (12 + 4 / 3))
    # Between lines of the metrics, images of many updates would fill the memory
    engine = engine_for(tmp_path / "kept", replace(PLAIN, epochs=1), log_every=100)
    next_batch, alive = engine.work.next_batch, []

    def followed():
        batch = next_batch()
        alive.append(sum(reference() is not None for reference in followed.made))
        followed.made.append(weakref.ref(batch))
        return batch

    followed.made = []
    engine.work.next_batch = followed
    engine.fit()
    assert max(alive) <= 1
