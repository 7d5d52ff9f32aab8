"""Learning to classify: what the model sees, what it is told, and how well it is said to do."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from timm.task import ClassificationTask
from torch import Tensor, nn

from broadsight.data.loading import Batch, EvalOrder, SourceDataset, TrainOrder, load
from broadsight.training.engine import Failed
from broadsight.training.objectives.classification import Classification
from broadsight.training.objectives.steps import LabelLoss
from broadsight.training.recipes import Recipe

from ...data.reading import Shades
from ...data.test_loading import pixels

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)


class Net(nn.Module):
    """Remembers what it saw; its logits are a linear function of the images' mean colour."""

    def __init__(self, classes: int = 2):
        super().__init__()
        self.fc, self.drop = nn.Linear(3, classes), nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.fc(self.drop(x.mean((2, 3))))


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def working(accelerator: Accelerator, net: nn.Module, source=None, batch: int = 4, classes: int = 2, **settings):
    source = source or Shades(12)
    recipe = Recipe(batch_size=batch, **settings)
    task = ClassificationTask(net, LabelLoss(recipe.loss, recipe.smoothing), verbose=False)
    order = TrainOrder(source, batch, accumulate=recipe.accumulate)
    train, val = SourceDataset(source, pixels, training=True), SourceDataset(source, pixels)
    loaders = load(train, order), order, load(val, EvalOrder(source, 5))
    return Classification(accelerator, task, recipe, *loaders, mean=MEAN, std=STD, classes=classes)


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images / 255 - mean) / std


def test_step__normalises_and_counts(accelerator):
    net = Net().eval()
    work = working(accelerator, net)
    work.begin_epoch(0, 0)
    batch = work.next_batch()
    step = work.step(batch)
    torch.testing.assert_close(net.seen[0], normalised(batch.images))
    logits = net(net.seen[0])
    torch.testing.assert_close(step.loss, F.cross_entropy(logits, batch.labels))
    assert step.count == 4 and step.correct == (logits.argmax(-1) == batch.labels).sum()
    working(accelerator, net, channels_last=True).step(batch)
    assert net.seen[-1].is_contiguous(memory_format=torch.channels_last) and not net.seen[-1].is_contiguous()


def test_step__mixes_and_smooths(accelerator):
    net = Net().eval()
    work = working(accelerator, net, mixup=0.8, cutmix=1.0, smoothing=0.1)
    own = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=2)
    work.begin_epoch(0, 0)
    kinds = set()
    for seed in range(6):
        batch = Batch((255 * torch.rand(4, 3, 8, 8)).byte(), torch.tensor([0, 1, 1, 0]), (), ())
        np.random.seed(seed)
        step = work.step(batch)
        np.random.seed(seed)
        images, target = own(normalised(batch.images), batch.labels)
        torch.testing.assert_close(net.seen[-1], images)
        torch.testing.assert_close(step.loss, -(target * net.fc(images.mean((2, 3))).log_softmax(-1)).sum(-1).mean())
        assert target.min() >= 0.05 - 1e-6 and step.correct is None
        original = normalised(batch.images)
        kinds.add("cutmix" if ((images == original).all(1).float().mean() > 0.2) else "mixup")
    assert kinds == {"cutmix", "mixup"}


def test_step__stops_mixing_and_erases_with_noise(accelerator):
    net = Net().eval()
    work = working(accelerator, net, mixup=0.8, mixup_off_epoch=2)
    for epoch, mixed in ((0, True), (1, True), (2, False), (3, False)):
        work.begin_epoch(epoch, 0)
        batch = work.next_batch()
        work.step(batch)
        assert torch.allclose(net.seen[-1], normalised(batch.images)) != mixed
    net = Net()
    work = working(accelerator, net, erasing=1.0)
    batch = Batch(torch.full((8, 3, 32, 32), 100, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), (), ())
    work.step(batch)
    erased = ~net.seen[0].isclose(normalised(batch.images), atol=1e-4).all(1)  # B H W
    assert erased.flatten(1).any(1).all() and not erased.flatten(1).all(1).any()
    assert net.seen[0][:, 0][erased].std() > 0.5
    working(accelerator, net, erasing=0.0).step(batch)
    torch.testing.assert_close(net.seen[1], normalised(batch.images))
    net = Net().eval()
    work = working(accelerator, net, mask_ratio=(1.0, 1.0), mask_patch=4)
    work.step(batch)
    assert not net.seen.pop().any()
    work.evaluate(net, lambda *_: None)  # of images that are whole
    shades = torch.cat([images[:, :, 0, 0] for images in net.seen])
    assert torch.allclose(shades, normalised(torch.arange(12.0).view(-1, 1, 1, 1))[:, :, 0, 0].expand(-1, 3))
    for odd in (dict(batch=3), dict(batch=6, accumulate=2)):
        with pytest.raises(ValueError, match="mixup and cutmix pair the images of a pass, of which there are 3; take"):
            working(accelerator, Net(), cutmix=1.0, **odd)


def test_epoch__starts_anywhere_names_reports_and_refuses(accelerator):
    work = working(accelerator, Net())
    assert (work.updates, work.batch, work.accumulate, work.evaluations) == (3, 4, 1, 12)
    work.begin_epoch(1, 0)
    whole = [work.next_batch().keys for _ in range(3)]
    work.begin_epoch(1, 2)
    assert work.next_batch().keys == whole[2]
    work = working(accelerator, Net(), Shades(12, broken=(3,)))
    work.begin_epoch(0, 0)
    skipped = {}
    for _ in range(3):
        batch = work.next_batch()
        skipped |= dict(batch.skipped)
        assert work.names(batch.keys) == [f"{colour}.png" for colour in batch.images[:, 0, 0, 0].tolist()]
    assert list(skipped) == ["3.png"]
    work.train.dataset.strict = True
    work.begin_epoch(0, 0)
    with pytest.raises(Failed, match=r"^3.png cannot be read"):
        for _ in range(3):
            work.next_batch()


def test_evaluate__by_hand(accelerator):
    net, source = Net(8).train(), Shades(12, broken=(5, 6))
    net.drop.eval()
    work = working(accelerator, net, source, classes=8)
    counted = []
    values, skipped = work.evaluate(net, counted.append)
    kept = torch.tensor([number for number in range(12) if number not in (5, 6)])
    logits = net.fc(normalised(kept.view(-1, 1, 1, 1).expand(-1, 3, 1, 1)).flatten(1))
    labels = kept % 2
    assert values["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert values["val_top1"] == pytest.approx(100 * (logits.argmax(-1) == labels).float().mean().item())
    five = (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
    assert values["val_top5"] == pytest.approx(100 * five)
    assert skipped.keys() == {"5.png", "6.png"} and sum(counted) == 10
    assert net.training and not net.drop.training  # each part as it was
    assert list(values) == ["val_loss", "val_top1", "val_top5"]
    work = working(accelerator, Net(5), classes=5)
    assert list(work.evaluate(Net(5), lambda *_: None)[0]) == ["val_loss", "val_top1"]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_evaluate__nothing_can_be_read_or_answers_are_no_numbers(accelerator):
    """0 % of no images would be a result; an error it is. Answers that are no numbers have no figures."""
    work = working(accelerator, Net(), Shades(12, broken=tuple(range(12))))
    with pytest.raises((ValueError, Failed), match="can be read"):
        work.evaluate(Net(), lambda *_: None)
    for bad in (float("nan"), float("inf")):
        net = Net()
        nn.init.zeros_(net.fc.weight)
        net.fc.bias.data = torch.tensor([0.0, bad])
        values, _ = working(accelerator, net).evaluate(net, lambda *_: None)
        assert values == {"val_loss": None, "val_top1": None}
