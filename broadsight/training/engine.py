"""The one loop of all training: updates, evaluations, checkpoints, and an end at any moment without loss."""

import math
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ..data.seeds import seed_everything
from ..data.sources.sample_table import some
from ..files import write_json
from . import checkpoints as state
from .display import Display, figure
from .objectives.objective import Failed, Interrupted, Progress, Work
from .processes import from_first, gather_objects, share_buffers, sum_over_processes
from .recipes import Recipe
from .records import DamagedRun, put_back
from .run_folder import BEST, METRICS, WEIGHTS, RunFolder


@dataclass(eq=False)
class Engine:
    """Trains a model."""

    accelerator: Accelerator  # has prepared `model` and `optimizer`
    work: Work
    model: nn.Module  # as it is trained
    plain: nn.Module  # without what wraps it
    optimizer: Any
    scheduler: Scheduler
    average: ModelEmaV3 | None  # moving average of the weights, which is then evaluated and kept
    recipe: Recipe
    folder: RunFolder
    display: Display
    _: KW_ONLY
    seed: int = 0
    log_every: int = 10  # updates between lines of the metrics; several processes agree as often on stopping and saving
    checkpoint_minutes: float = 10.0  # between checkpoints within an epoch; one follows every epoch anyhow

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.repairs: list[str] = []  # damage that was mended, a line each
        self.epochs = self.recipe.epochs + self.recipe.cooldown_epochs
        self.device = self.accelerator.device
        self._alone, self._asked_to_stop = self.accelerator.num_processes == 1, 0
        self._saved_at = time.monotonic()
        self._since_check: list[tuple[Tensor, Any]] = []
        precise = torch.float32 if self.device.type == "mps" else torch.float64
        self._interval, self._total = (torch.zeros(n, dtype=precise, device=self.device) for n in (2, 3))
        self._shown_loss = math.nan
        self._trainable = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        self._averaged = None if self.average is None else self.average.module
        self.evaluated_model = self.plain if self._averaged is None else self._averaged

    def resume(self) -> bool:
        """Continue from the last checkpoint, or the one before if it is damaged; False if there is none.

        What the run has written since then is undone, and damaged files are written again.
        """
        found, damages = state.checkpoints(self.folder.last, self.folder.previous), {}
        for checkpoint in found:
            try:
                self.progress = Progress(**state.read_progress(checkpoint))
                if not self.folder.owns(self.progress.run):
                    raise state.DamagedCheckpoint(f"checkpoint {checkpoint} is not of the run in config.json")
                state.restore(checkpoint, self.accelerator, self._averaged)
                break
            except state.DamagedCheckpoint as error:
                damages[checkpoint] = error
        else:
            if not found:
                return False
            raise damages[found[0]]
        self._leave_out(damages, checkpoint)
        self.scheduler.load_state_dict(self.progress.scheduler)
        self.scheduler.step_update(self.progress.updates)
        if self.accelerator.is_main_process:  # the sums were over all processes
            for sums, values in ((self._interval, self.progress.interval), (self._total, self.progress.total)):
                sums.copy_(torch.tensor(values, dtype=sums.dtype))
        return True

    def _leave_out(self, damages: Mapping[Path, Exception], checkpoint: Path) -> None:
        """Remove damaged checkpoints, and make the folder's files those of the one that is whole."""
        failure = None
        self.accelerator.wait_for_everyone()  # all have looked at them
        if self.accelerator.is_main_process:
            for damaged in damages:
                shutil.rmtree(damaged, ignore_errors=True)
                self.repairs.append(f"checkpoint {damaged.name} was damaged: going on from {checkpoint.name}")
            try:
                with self._writing():
                    self.repairs += put_back(self.folder, checkpoint, self.progress, self.evaluated_model)
            except (DamagedRun, Failed) as error:
                failure = error
        if (said := from_first(failure and str(failure))) is not None:
            raise failure or Failed(said)

    def fit(self) -> Progress:
        """Train to the end, or until asked to stop."""
        progress = self.progress
        if progress.finished:
            self.folder.draw()  # a kill may have come before that
            return progress
        with self._listening():
            try:
                with self._writing():
                    self.folder.open_logs(progress.metrics_size, progress.updates)
                self.display.begin(total_images(self.work, progress.epoch) + progress.update * self.work.batch)
                while not progress.finished:
                    self._train_epoch()
                    self.save()  # an evaluation that fails loses nothing
                    self._evaluate_epoch()
                    gave_up = bool(self.recipe.patience) and progress.stale >= self.recipe.patience
                    progress.finished = gave_up or progress.epoch >= self.epochs
                    self.save()
                with self._writing():
                    self.folder.draw()
                    self.folder.close()
            finally:
                with suppress(OSError):  # that a disk is full has been said
                    self.folder.close()
        return progress

    def save(self) -> None:
        """Write a checkpoint, with copies of the folder's files, so that damaged ones can be written again."""
        progress, folder = self.progress, self.folder
        self._check_weights()
        for others in gather_objects(progress.skipped):
            progress.skipped.update(others)
        sums = sum_over_processes(torch.cat([self._interval, self._total])).tolist()
        progress.interval, progress.total = sums[:2], sums[2:]
        progress.scheduler = {k: v for k, v in self.scheduler.state_dict().items() if k != "metric"}
        progress.run = folder.identity
        copies = {METRICS: folder.path / METRICS}
        if progress.epoch > 0 and not progress.keeps_present:
            copies[BEST] = folder.path / WEIGHTS
        with self._writing():
            progress.metrics_size = folder.metrics_size()
            beside = {name: file for name, file in copies.items() if file.is_file()}
            state.save(folder.last, self.accelerator, asdict(progress), self._averaged, beside, folder.previous)
        self._saved_at = time.monotonic()

    def _train_epoch(self) -> None:
        progress, work = self.progress, self.work
        if progress.update >= work.updates:  # interrupted while it was evaluated
            return
        self.plain.train(not work.stays_in_eval)
        work.begin_epoch(progress.epoch, progress.update)
        while progress.update < work.updates:
            batches = [work.next_batch() for _ in range(work.accumulate)]
            rate = max(group["lr"] / group.get("lr_scale", 1.0) for group in self.optimizer.param_groups)
            with self._within_memory():
                self._update(batches)
            progress.update, progress.updates, progress.evaluated = progress.update + 1, progress.updates + 1, False
            for batch in batches:
                progress.skipped.update(batch.skipped)
            last = progress.update == work.updates
            logged = last or progress.updates % self.log_every == 0
            if logged:
                self._log(rate)
            if logged or self._alone:  # save if it is time, and stop if asked to; several processes do so together
                due = not last and time.monotonic() - self._saved_at > 60 * self.checkpoint_minutes
                if not self._alone:
                    due, self._asked_to_stop = from_first(due), max(gather_objects(self._asked_to_stop))
                if self._asked_to_stop:
                    self._stop()
                if due:
                    self._check_losses()
                    self.save()

    def _update(self, batches: Sequence[Any]) -> None:
        """One step of the optimiser, from as many passes as there are batches."""
        progress = self.progress
        # All that is drawn from here on depends on this update alone, so a resumed run draws the same
        seed_everything(self.seed, progress.updates, self.accelerator.process_index)
        for number, batch in enumerate(batches, 1):
            waiting = number < len(batches)
            with self.accelerator.no_sync(self.model) if waiting else nullcontext():
                with self.accelerator.autocast():
                    step = self.work.step(batch)
                self.accelerator.backward(step.loss / len(batches) if len(batches) > 1 else step.loss)
            loss = step.loss.detach()
            self._since_check.append((loss, batch.keys))  # not the images: they would fill the memory
            for sums in (self._interval, self._total):
                sums[0] += loss * step.count
                sums[-1] += step.count
            if step.correct is not None:
                self._total[1] += step.correct
        if self.recipe.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self._trainable, self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step_update(progress.updates + 1)
        if self.average is not None:
            self.average.update(self.plain, step=progress.updates + 1)
        self._show(self.work.batch)

    def _log(self, rate: float) -> None:
        """Check the losses of late and write their mean."""
        self._check_losses()
        loss, count = sum_over_processes(self._interval).tolist()
        self._shown_loss = loss / count
        self._interval.zero_()
        place = dict(updates=self.progress.updates, epoch=self.progress.epoch + 1)
        with self._writing():
            self.folder.record(dict(kind="updates", **place, loss=self._shown_loss, lr=rate))
            self.folder.scalars({"images_per_second": self.display.speed()}, self.progress.updates)

    def _check_losses(self) -> None:
        """Refuse to go on from a loss that is not finite, and name the images that it came from."""
        losses = [loss for loss, _ in self._since_check]
        if losses and len(bad := (~torch.isfinite(torch.stack(losses))).nonzero()):
            loss, keys = self._since_check[int(bad[0])]
            names, whole = self.work.names(keys), ""
            with suppress(OSError):
                write_json(names, self.folder.path / "bad_batch.json")
                whole = " (all of them: bad_batch.json)"
            raise self._diverged(f"the loss is {float(loss)}", f", for the batch {some(names, 4)}{whole}")
        self._since_check.clear()

    def _check_weights(self) -> None:
        """Refuse to keep weights that are not finite: a gradient can overflow where the loss does not."""
        values = [value for value in self.plain.state_dict().values() if value.is_floating_point()]
        if not torch.stack([norm.float() for norm in torch._foreach_norm(values)]).isfinite().all():
            raise self._diverged("the weights are no numbers any more")

    def _diverged(self, what: str, where: str = "") -> Failed:
        place = f"epoch {self.progress.epoch + 1}, about update {self.progress.updates}{where}"
        advice = "try a lower lr, clip_norm=1 or precision=fp32"
        return Failed(f"{what} in {place}; {self._last_checkpoint()}; {advice}")

    def _evaluate_epoch(self) -> None:
        progress = self.progress
        if self.average is not None:
            share_buffers(self.average.module)
        share_buffers(self.plain)
        self._check_weights()
        with self._within_memory():
            values, skipped = self.work.evaluate(self.evaluated_model, self._seen)
        for others in gather_objects(dict(skipped)):
            progress.skipped.update(others)
        loss, correct, count = sum_over_processes(self._total).tolist()
        trained = {"train_loss": loss / count}
        if self.work.counts_correct:
            trained["train_top1"] = 100 * correct / count
        self._total.zero_()
        values = {name: None if value is None or not math.isfinite(value) else value for name, value in values.items()}
        progress.epoch, progress.update, progress.evaluated = progress.epoch + 1, 0, True
        goal = values[self.work.goal] if self.work.comparable else None
        improved = goal is not None and (progress.best is None or goal > progress.best)
        if improved:
            progress.best, progress.best_epoch = goal, progress.epoch
        progress.stale = progress.epoch - progress.best_epoch if progress.best_epoch else 0
        line: dict[str, Any] = dict(kind="epoch", updates=progress.updates, epoch=progress.epoch, **trained, **values)
        line |= dict(best=progress.best, best_epoch=progress.best_epoch, skipped=len(progress.skipped))
        with self._writing():
            if improved or progress.best is None:  # where no epoch can be compared, the last one is kept
                progress.best_weights = self.folder.keep_best(self.evaluated_model)
            self.folder.record(line)
            self.folder.report_skipped(progress.skipped)
            self.folder.draw(at_most_every=60.0)
        self.display.line(self._summary(line, improved))

    def _seen(self, images: int) -> None:
        """Between two batches of an evaluation, whose images cost a third of a training step's."""
        self._show(images / 3, "evaluating")
        if self._alone and self._asked_to_stop:
            self._stop()

    def _stop(self) -> None:
        self._check_losses()
        self.save()
        where = f"epoch {self.progress.epoch + 1}, update {self.progress.updates}"
        command = f"broadsight train --resume --out {shlex.quote(str(self.folder.path))}"
        raise Interrupted(f"stopped in {where} and saved; continue with: {command}", self._asked_to_stop)

    @contextmanager
    def _listening(self) -> Generator[None, None, None]:
        """SIGTERM and Ctrl-C ask to stop; a second Ctrl-C stops at once."""

        def ask(number: int, _: Any) -> None:
            if self._asked_to_stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._asked_to_stop = number
            # Not print, which the signal may have interrupted
            os.write(2, b"stopping after this step; Ctrl-C again stops at once, at the last checkpoint\n")

        if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
            yield
            return
        with ExitStack() as after:
            for number in (signal.SIGINT, signal.SIGTERM):
                after.callback(signal.signal, number, signal.signal(number, ask))
            yield

    @contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            # torch's words for a file that ended too early
            if isinstance(error, RuntimeError) and not _says(error, "writ", "unexpected pos", "iostream"):
                raise
            reason = getattr(error, "strerror", None) or f"{str(error).splitlines()[0]} (a full disk?)"
            raise Failed(f"cannot write to {self.folder.path}: {reason}; {self._last_checkpoint()}") from error

    @contextmanager
    def _within_memory(self) -> Generator[None, None, None]:
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            known = ("out of memory", "can't allocate memory", "defaultcpuallocator")
            if isinstance(error, RuntimeError) and not _says(error, *known):
                raise
            batch = f"a batch of {self.work.batch // self.work.accumulate} images"
            advice = f"try --set accumulate={2 * self.recipe.accumulate} for the same result, or a smaller batch_size"
            what = f"{batch} does not fit into the memory of {self.device}"
            raise Failed(f"{what}; {advice}; {self._last_checkpoint()}") from error

    def _last_checkpoint(self) -> str:
        if (checkpoint := state.newest(self.folder.last)) is None:
            return "no checkpoint had been written"
        return f"the last checkpoint, {checkpoint.relative_to(self.folder.path)}, is whole: --resume continues from it"

    def _show(self, images: float, state: str | None = None) -> None:
        """Count images that are done, and show how the epoch goes."""
        best = f"  best {self.progress.best:.1f} %" if self.progress.best is not None else ""
        loss = "" if math.isnan(self._shown_loss) else f"loss {self._shown_loss:.3f}  "
        state = state or f"{loss}{self.display.speed():.0f} images/s{best}"
        self.display.advance(images, f"epoch {self.progress.epoch + 1}/{self.epochs}", state)

    def _summary(self, line: Mapping[str, Any], improved: bool) -> str:
        figures = [f"epoch {line['epoch']}/{self.epochs}", f"train loss {line['train_loss']:.4f}"]
        figures += [f"val loss {figure(line['val_loss'], 4)}"] if "val_loss" in line else []
        figures += [f"{self.work.goal.removeprefix('val_')} {figure(line[self.work.goal], 2)}{' *' * improved}"]
        figures += [f"{self.display.speed():.0f} images/s", self.display.left()]
        return "  ".join(figures + [f"{line['skipped']} images skipped"] * bool(line["skipped"]))


def total_images(work: Work, epochs: int) -> float:
    """Images of some epochs as the display counts them: one of an evaluation costs a third."""
    return epochs * (work.updates * work.batch + work.evaluations / 3)


def _says(error: Exception, *texts: str) -> bool:
    return any(text in str(error).lower() for text in texts)
