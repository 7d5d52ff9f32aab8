"""The work of an engine that trains dense models, with models and data that are made up."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from broadsight.data.dense.loading import DenseBatch
from broadsight.dense.scoring import Scorer
from broadsight.training import processes
from broadsight.training.engine import Failed
from broadsight.training.objectives.dense import DenseWork


class Order:
    """What is known of an order without drawing one."""

    updates, batch, accumulate, processes = 2, 4, 1, 1
    source = SimpleNamespace(name="image {}".format)

    def start(self, epoch, first):
        self.started = epoch, first


class Loader(list):
    dataset = range(3)
    _iterator = None


class Counting(Scorer):
    """Counts images; the figure is their number, and another one is undefined."""

    goal = "miou"

    def __init__(self):
        self.seen, self.modes = 0, []

    def reset(self):
        self.seen = 0

    def add(self, model, batch):
        self.modes.append((model.training, torch.is_inference_mode_enabled()))
        self.seen += len(batch.images)
        return len(batch.images)

    def state(self):
        return self.seen

    @property
    def metric(self):
        return SimpleNamespace(coverage=lambda: (2, 3))

    def merge(self, others):
        self.seen = sum(others)

    def compute(self):
        return {"miou": float(self.seen), "macc": float("nan")}


class Losses(nn.Module):
    """Two losses of whatever comes, which it keeps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, targets=None):
        self.images, self.targets = images, targets
        return {"one": self.weight * 3, "other": self.weight**2}


def batch_of(count, target, size=(4, 6)):
    images = [torch.full((3, *size), 51 * number, dtype=torch.uint8) for number in range(count)]
    return DenseBatch(images, [target] * count, tuple((0, n, n) for n in range(count)), (("bad.png", "torn"),))


def work_for(train=(), val=(), stacked=False):
    scorer = Counting()
    work = DenseWork(processes.connect("cpu"), Losses(), scorer, Loader(train), Order(), Loader(val), stacked=stacked)
    return work, scorer


def test_step__is_the_sum_of_the_losses_of_images_from_0_to_1():
    work, _ = work_for()
    target = dict(boxes=torch.ones(2, 4), labels=torch.ones(2, dtype=torch.int64), image_id=7)
    step = work.step(batch_of(2, target))
    assert (step.loss.item(), step.count, step.correct) == (10.0, 2, None)
    assert [image.unique().tolist() for image in work.model.images] == [[0.0], [pytest.approx(0.2)]]
    assert work.model.targets[0].keys() == {"boxes", "labels"}  # what is no tensor stays behind
    stacking, _ = work_for(stacked=True)
    stacking.step(batch_of(2, torch.ones(4, 6, dtype=torch.int64)))
    assert (stacking.model.images.shape, stacking.model.targets.shape) == ((2, 3, 4, 6), (2, 4, 6))
    stacking.step(batch_of(3, dict(heatmaps=torch.ones(5, 2, 2), weights=torch.ones(5), meta={})))
    assert [x.shape for x in stacking.model.targets] == [(3, 5, 2, 2), (3, 5)]


def test_evaluate__in_eval_mode_with_none_for_undefined_figures_and_failures_in_their_words():
    batches = [batch_of(2, None), DenseBatch([], [], (), ()), batch_of(1, None)]
    work, scorer = work_for(val=batches)
    told = []
    values, skipped = work.evaluate(nn.Linear(1, 1).train(), told.append)
    assert values == {"val_miou": 3.0, "val_macc": None, "val_classes": 2} and skipped == {"bad.png": "torn"}
    assert scorer.modes == [(False, True)] * 2 and told == [2, 1]
    assert (work.goal, work.evaluations) == ("val_miou", 3)
    assert work.evaluate(nn.Linear(1, 1), lambda *_: None)[0] == values  # begins anew
    assert work.names(batches[0].keys) == ["image 0", "image 1"]
    work, _ = work_for(train=[DenseBatch([], [], (), (), "a.png holds 9, which is none of the 2 classes")])
    work.begin_epoch(1, 0)
    with pytest.raises(ValueError, match=r"^a.png holds 9"):
        work.next_batch()
    assert work.order.started == (1, 0)
    empty, _ = work_for(val=[DenseBatch([], [], (), (("a.png", "torn"),))])
    with pytest.raises(Failed, match="none of the 3 images to validate on can be read"):
        empty.evaluate(nn.Linear(1, 1), lambda *_: None)
