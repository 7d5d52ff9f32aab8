"""Losses of multi-token pooling: stored values of the release, slow loops written from the formulas, and hand sums."""

import copy
import math
import warnings
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import save_for_hf
from torch import Tensor, nn

from broadsight.layers import GroupLogits, MultiTokenPool
from broadsight.losses import MultiTokenDistillationLoss, MultiTokenLoss, aggregate
from tests.compare import assert_close
from tests.refusals import refused

HEADS = ["paper_r50", "release_r50", "convnext", "pit", "mobilenet", "nogram", "ga", "fastervit"]


def draw(images=4, groups=3, classes=5, *, average=True, distill=False, dtype=torch.float64) -> GroupLogits:
    def leaf() -> Tensor:
        return (2 * torch.randn(images, groups, classes, dtype=dtype)).requires_grad_()

    return GroupLogits(leaf(), leaf() if average else None, None, leaf() if distill else None)


def soft_target(images: int = 4, classes: int = 5) -> Tensor:
    return torch.randn(images, classes, dtype=torch.float64).softmax(-1)


LABELS = torch.tensor([4, 0, 2, 2])


def log_softmax(row: Tensor) -> Tensor:
    return row - row.exp().sum().log()


def ce(rows: Tensor, target: Tensor) -> Tensor:
    return sum(-(t * log_softmax(row)).sum() for row, t in zip(rows, target, strict=True)) / len(rows)


def bce(rows: Tensor, target: Tensor) -> Tensor:
    log_yes, log_no = -(1 + (-rows).exp()).log(), -(1 + rows.exp()).log()
    return -(target * log_yes + (1 - target) * log_no).sum() / rows.numel()


def kl(log_teacher: Tensor, log_student: Tensor, reduction: str = "mean") -> Tensor:
    """Of rows of log-probabilities."""
    total = sum((p.exp() * (p - q)).sum() for p, q in zip(log_teacher, log_student, strict=True))
    return total / (len(log_teacher) if reduction == "batchmean" else log_teacher.numel())


def rows(logits: Tensor) -> Tensor:
    return torch.stack([log_softmax(row) for row in logits])


def reference(logits: GroupLogits, target: Tensor, criterion=ce, intra=1.0, inter=-0.8, **options) -> dict[str, Tensor]:
    """The loss's parts."""
    usual = dict(label_loss="groups", intra_direction="tokens_to_mean", inter_target="logit_mean", reduction="mean")
    printed = dict(label_loss="sum", inter_target="probability_mean", reduction="batchmean", stop_gradient=False)
    usual = usual | dict(stop_gradient=True) | (printed if options.pop("reading", None) == "equations" else {})
    label_loss, intra_direction, inter_target, reduction, stop_gradient = (usual | options).values()
    constant = Tensor.detach if stop_gradient else lambda x: x
    y, a = logits.tokens, logits.average
    groups = y.shape[1]
    everything = sum(y[:, g] + (0 if a is None else a[:, g]) for g in range(groups))
    parts = {"intra": torch.zeros((), dtype=torch.float64), "inter": 0}
    if label_loss == "groups":
        parts["base"] = sum(criterion(y[:, g], target) for g in range(groups))
    elif label_loss == "total":
        parts["base"] = criterion(sum(y[:, g] for g in range(groups)) / groups, target)
    else:
        parts["base"] = criterion(everything, target)
    for g in range(groups):
        if a is not None:
            pair = (y[:, g], a[:, g]) if intra_direction == "tokens_to_mean" else (a[:, g], y[:, g])
            parts["intra"] = parts["intra"] + kl(rows(constant(pair[0])), rows(pair[1]), reduction)
        if inter_target == "probability_mean":
            together = (sum(rows(constant(y[:, i])).exp() for i in range(groups)) / groups).log()
        elif inter_target == "logit_mean":
            together = rows(sum(constant(y[:, i]) for i in range(groups)) / groups)
        else:
            together = rows(constant(everything))
        parts["inter"] = parts["inter"] + kl(together, rows(y[:, g]), reduction)
    return parts | {"total": parts["base"] + intra * parts["intra"] + inter * parts["inter"]}


def assert_same_parts(got: dict[str, Tensor], expected: dict[str, Tensor], logits: GroupLogits) -> None:
    """Also that the parts of the groups add up, and are equal shares where the loss is not of the groups."""
    for name, value in expected.items():
        assert got[name].shape == ()
        assert_close(got[name].detach(), value.detach(), name, 1e-12)
        if name != "total":
            assert got[f"{name}_per_group"].shape == (logits.tokens.shape[1],)
            assert_close(got[f"{name}_per_group"].sum().detach(), value.detach(), name, 1e-12)
    assert_same_loss(got["total"], expected["total"], logits)


def assert_same_loss(got: Tensor, expected: Tensor, logits: GroupLogits, tolerance: float = 1e-12) -> None:
    assert_close(got.detach(), expected.detach(), "loss", tolerance)
    inputs = [x for x in logits if x is not None]
    ours = torch.autograd.grad(got, inputs, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, "gradient", tolerance)


@pytest.mark.parametrize("criterion", ["bce", "ce"])
@pytest.mark.parametrize("head", HEADS)
def test_golden__parts_totals_and_gradients(golden, head, criterion):
    stored, config = golden(f"map_{head}")
    G = config["n_groups"]

    def stack(name: str) -> Tensor:
        return torch.stack([stored[f"{name}.g{g}"] for g in range(G)], -2)

    y = stack("train.logits").requires_grad_()
    a = stack("train.avg").requires_grad_() if config["mean_token"] else None
    parts = MultiTokenLoss(criterion).parts(GroupLogits(y, a), stored["loss.target"])
    for ours, name in (("base", criterion), ("intra", "intra"), ("inter", "inter")):
        if f"loss.{name}.g0" in stored:
            expected = torch.stack([stored[f"loss.{name}.g{g}"] for g in range(G)])
        else:
            assert (name == "intra" and a is None) or (name == "inter" and G == 1)
            expected = torch.zeros(G)
        assert_close(parts[f"{ours}_per_group"].detach(), expected, name, 2e-5)
        assert_close(parts[ours].detach(), expected.sum(), name, 2e-5)
    assert_close(parts["total"].detach(), stored[f"loss.total_{criterion}"], "total", 2e-5)
    parts["total"].backward()
    assert_close(y.grad, stack(f"grad.{criterion}.logits"), "gradient of the tokens' logits", 2e-5)
    if a is not None:
        assert_close(a.grad, stack(f"grad.{criterion}.avg"), "gradient of the averaged token's logits", 2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(intra=0.0),  # the loss of the predecessor
        dict(intra=0.3, inter=-1.0),
        dict(label_loss="total"),
        dict(label_loss="sum", inter_target="logit_sum", inter=-1.0),
        dict(intra_direction="mean_to_tokens"),
        dict(inter_target="probability_mean"),
        dict(inter_target="logit_sum"),
        dict(reduction="batchmean", inter=0.5),
        dict(stop_gradient=False),
        dict(stop_gradient=False, inter_target="logit_sum", intra_direction="mean_to_tokens"),
        dict(reading="equations", inter=0.4),
        dict(reading="equations", inter=0.4, inter_target="logit_sum", stop_gradient=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("average", [True, False], ids=["average", "no average"])
@pytest.mark.parametrize("criterion", [ce, bce], ids=["ce", "bce"])
def test_options__equal_the_slow_loop(criterion, average, options):
    logits, target = draw(average=average), soft_target()
    loss = MultiTokenLoss(criterion.__name__, **options)
    parts = loss.parts(logits, target)
    assert_same_parts(parts, reference(logits, target, criterion, **options), logits)
    assert torch.equal(loss(logits, target), parts["total"])
    if options.get("label_loss") in ("total", "sum"):
        assert_close(parts["base_per_group"], (parts["base"] / 3).expand(3), "shares", 1e-12)


def test_hand_computed__two_groups_two_classes():
    """One image; probabilities 1/4 : 3/4 and 3/4 : 1/4, so the logit mean says 1/2 : 1/2."""
    log3 = math.log(3)
    y = torch.tensor([[[0.0, log3], [log3, 0.0]]], dtype=torch.float64)
    a = torch.zeros_like(y)
    parts = MultiTokenLoss("ce").parts(GroupLogits(y, a), torch.tensor([1]))
    from_tokens = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    from_mean = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert parts["base_per_group"].tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)])
    assert parts["intra_per_group"].tolist() == pytest.approx([from_tokens / 2] * 2)  # 2 classes
    assert parts["inter_per_group"].tolist() == pytest.approx([from_mean / 2] * 2)
    expected = -math.log(0.75) - math.log(0.25) + from_tokens - 0.8 * from_mean
    assert parts["total"].item() == pytest.approx(expected)
    # A mean token that says the same as the aggregate: swapping teacher and student swaps the two numbers.
    swapped = MultiTokenLoss("ce", intra_direction="mean_to_tokens").parts(GroupLogits(y, a), torch.tensor([1]))
    assert swapped["intra"].item() == pytest.approx(from_mean)
    total = MultiTokenLoss("ce", label_loss="total").parts(GroupLogits(y, a), torch.tensor([1]))
    assert total["base"].item() == pytest.approx(math.log(2))
    with pytest.warns(UserWarning, match="no lower bound"):
        larger = MultiTokenLoss("ce", reduction="batchmean").parts(GroupLogits(y, a), torch.tensor([1]))
    assert larger["intra"].item() == pytest.approx(2 * from_tokens)
    assert larger["inter"].item() == pytest.approx(2 * from_mean)
    # The mean of probabilities is not that of logits
    y = torch.tensor([[[0.0, math.log(9)], [0.0, 0.0]]], dtype=torch.float64)  # 1/10 : 9/10 and 1/2 : 1/2
    parts = MultiTokenLoss("ce", inter_target="probability_mean").parts(GroupLogits(y), torch.tensor([0]))
    first = 0.3 * math.log(0.3 / 0.1) + 0.7 * math.log(0.7 / 0.9)
    second = 0.3 * math.log(0.3 / 0.5) + 0.7 * math.log(0.7 / 0.5)
    assert parts["inter_per_group"].tolist() == pytest.approx([first / 2, second / 2])
    parts = MultiTokenLoss("ce").parts(GroupLogits(y), torch.tensor([0]))  # 1/4 : 3/4
    first = 0.25 * math.log(0.25 / 0.1) + 0.75 * math.log(0.75 / 0.9)
    assert parts["inter_per_group"][0].item() == pytest.approx(first / 2)


def test_reading__of_the_equations_is_what_is_printed():
    """One cross-entropy, of the sum of all logits; divergences over images alone, from the mean of probabilities."""
    y = torch.tensor([[[0.0, math.log(9)], [0.0, 0.0]]], dtype=torch.float64)  # 1/10 : 9/10 and 1/2 : 1/2
    with pytest.warns(UserWarning, match="no lower bound"):
        loss = MultiTokenLoss("ce", reading="equations")
    parts = loss.parts(GroupLogits(y, torch.zeros_like(y)), torch.tensor([0]))
    assert parts["base"].item() == pytest.approx(math.log(10))
    intra = 0.1 * math.log(0.1 / 0.5) + 0.9 * math.log(0.9 / 0.5)
    assert parts["intra_per_group"].tolist() == pytest.approx([intra, 0.0])
    first = 0.3 * math.log(0.3 / 0.1) + 0.7 * math.log(0.7 / 0.9)
    second = 0.3 * math.log(0.3 / 0.5) + 0.7 * math.log(0.7 / 0.5)
    assert parts["inter_per_group"].tolist() == pytest.approx([first, second])
    assert parts["total"].item() == pytest.approx(math.log(10) + intra - 0.8 * (first + second))
    chosen = dict(label_loss="groups", inter_target="logit_mean", reduction="mean", stop_gradient=True)
    logits, again = draw(), MultiTokenLoss("ce", reading="equations", **chosen)
    assert torch.equal(again(logits, LABELS), MultiTokenLoss("ce")(logits, LABELS))


def test_gradients__go_where_the_release_sends_them():
    logits = draw()
    parts = MultiTokenLoss("ce").parts(logits, soft_target())
    y, a = logits.tokens, logits.average
    assert torch.autograd.grad(parts["base"], [a], allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(parts["intra"], [y], allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(parts["inter"], [a], allow_unused=True, retain_graph=True) == (None,)
    # The aggregate is detached: a group's divergence moves that group alone.
    (gradient,) = torch.autograd.grad(parts["inter_per_group"][1], [y])
    assert gradient[:, 1].abs().min() > 0 and gradient[:, [0, 2]].abs().max() == 0
    # One group has no inter term
    logits = draw(groups=1)
    parts = MultiTokenLoss("bce", inter=-100.0).parts(logits, soft_target())
    assert parts["inter"] == 0
    assert_close(parts["total"], parts["base"] + parts["intra"], "total", 1e-12)
    # Where the teachers learn too, every term reaches whatever it compares.
    logits = draw()
    parts = MultiTokenLoss("ce", stop_gradient=False).parts(logits, soft_target())
    (gradient,) = torch.autograd.grad(parts["intra"], [logits.tokens], retain_graph=True)
    assert gradient.abs().min() > 0
    (gradient,) = torch.autograd.grad(parts["inter_per_group"][1], [logits.tokens])
    assert gradient.abs().min() > 0
    # With intra=0 a zero reaches the averaged classifier, not nothing: DistributedDataParallel waits for it
    logits = draw()
    MultiTokenLoss("ce", intra=0)(logits, soft_target()).backward()
    assert logits.average.grad is not None and logits.average.grad.abs().max() == 0


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_class_indices__equal_their_soft_targets(name):
    for smoothing in (0.0, 0.1):
        logits, loss = draw(), MultiTokenLoss(name, smoothing=smoothing)
        soft = torch.full((4, 5), smoothing / 5, dtype=torch.float64)
        soft[torch.arange(4), LABELS] += 1 - smoothing
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert_same_loss(loss(logits, LABELS.to(dtype)), MultiTokenLoss(name)(logits, soft), logits)
        assert torch.equal(loss(logits, soft), MultiTokenLoss(name)(logits, soft))  # which are not smoothed again


def test_foreign_criteria__equal_the_built_in_ones_but_have_weights_and_calls_of_their_own():
    for criterion, own, target in (
        (nn.CrossEntropyLoss(), dict(criterion="ce"), LABELS),
        (nn.CrossEntropyLoss(label_smoothing=0.1), dict(criterion="ce", smoothing=0.1), LABELS),
        (nn.CrossEntropyLoss(), dict(criterion="ce"), None),
        (SoftTargetCrossEntropy(), dict(criterion="ce"), None),
        (LabelSmoothingCrossEntropy(0.2), dict(criterion="ce", smoothing=0.2), LABELS),
        (nn.BCEWithLogitsLoss(), dict(criterion="bce"), None),
        (BinaryCrossEntropy(0.1), dict(criterion="bce", smoothing=0.1), LABELS),
        (BinaryCrossEntropy(0.1), dict(criterion="bce"), None),
        (lambda y, t: nn.functional.cross_entropy(y, t), dict(criterion="ce"), LABELS),
    ):
        logits = draw()
        target = soft_target() if target is None else target
        assert_same_loss(MultiTokenLoss(criterion)(logits, target), MultiTokenLoss(**own)(logits, target), logits)
    logits, target = draw(), torch.tensor([4, -100, 2, 7])
    criterion = nn.CrossEntropyLoss(weight=torch.rand(5).double() + 0.1)
    with pytest.raises(ValueError, match="target holds class 7"):
        MultiTokenLoss(criterion)(logits, target)
    target[3] = 1
    parts = MultiTokenLoss(criterion).parts(logits, target)
    expected = torch.stack([criterion(logits.tokens[:, g], target) for g in range(3)])
    assert_close(parts["base_per_group"], expected, "losses", 1e-12)
    target[3] = 7
    MultiTokenLoss(nn.CrossEntropyLoss(ignore_index=7))(logits, target.clamp(min=0))
    calls = []

    def criterion(logits: Tensor, target: Tensor) -> Tensor:
        calls.append(logits.is_contiguous())
        return logits.sum()

    MultiTokenLoss(criterion, label_loss="total")(draw(), LABELS)
    assert calls == [True]
    MultiTokenLoss(criterion)(draw(), LABELS)
    assert calls == [True] * 4
    loss = MultiTokenLoss(nn.CrossEntropyLoss(weight=torch.ones(5))).double()
    assert loss.criterion.weight.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision__is_computed_in_float32_and_autocast_changes_nothing(dtype):
    logits = GroupLogits(*[x.detach().to(dtype) for x in draw()[:2]])
    target = soft_target().to(dtype)
    exact = GroupLogits(logits.tokens.float(), logits.average.float())
    for criterion in ("ce", "bce", SoftTargetCrossEntropy()):
        parts = MultiTokenLoss(criterion).parts(logits, target)
        for name, value in MultiTokenLoss(criterion).parts(exact, target.float()).items():
            assert parts[name].dtype == torch.float32 and torch.equal(parts[name], value), name
    logits, target, projection = exact, target.float(), torch.randn(5, 5)

    def criterion(logits: Tensor, target: Tensor) -> Tensor:  # a product, which autocast would round
        return ((logits @ projection) * target).mean()

    for each in ("ce", "bce", criterion):
        expected = MultiTokenLoss(each)(logits, target)
        with torch.autocast("cpu", dtype):
            got = MultiTokenLoss(each)(logits, target)
        assert got.dtype == torch.float32 and torch.equal(got, expected)


def test_large_logits_stay_finite_and_operations_do_not_grow_with_the_groups():
    y = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]]], requires_grad=True)
    for criterion in ("ce", "bce"):
        for inter_target in ("logit_mean", "probability_mean", "logit_sum"):
            loss = MultiTokenLoss(criterion, inter_target=inter_target)(GroupLogits(y, -y), torch.tensor([0]))
            loss.backward()
            assert loss.isfinite() and y.grad.isfinite().all()

    def count(groups: int) -> int:
        logits = draw(groups=groups)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            MultiTokenLoss("bce")(logits, LABELS)
        return len([event for event in profile.events() if event.name.startswith("aten::")])

    assert count(2) == count(7)
    logits = draw()
    for target in (LABELS, soft_target()):
        for criterion in ("ce", "bce", nn.CrossEntropyLoss()):
            loss = MultiTokenLoss(criterion)
            compiled = torch.compile(loss, backend="eager", fullgraph=True)
            assert_same_loss(compiled(logits, target), loss(logits, target), logits)


def test_aggregate__is_the_mean_of_the_groups():
    y, a, _, d = (None if x is None else x.detach() for x in draw(distill=True))
    assert torch.equal(aggregate(GroupLogits(y, a)), y.mean(1))
    assert_close(aggregate(GroupLogits(y, a, distill=d)), (y.mean(1) + d.mean(1)) / 2, "aggregate", 1e-12)
    assert torch.equal(aggregate(GroupLogits(None, a)), a.mean(1))
    refuses(lambda: aggregate(GroupLogits(None)), "neither tokens nor average")


@pytest.mark.parametrize("distill", [0, 1])
def test_pool__answers_the_aggregate_and_learns_in_every_parameter(distill):
    sizes = dict(level=1, dim=12, groups=3, tokens=2, gram_groups=1, heads=2, distill_tokens=distill)
    pool = MultiTokenPool((4, 6), 5, **sizes).double().eval()
    features = [torch.randn(4, 4, 6, 6, dtype=torch.float64), torch.randn(4, 6, 3, 3, dtype=torch.float64)]
    assert_close(aggregate(pool.forward_groups(features)), pool(features), "answer", 1e-12)
    logits = pool.train().forward_groups(features)
    if distill:
        MultiTokenDistillationLoss("bce", None)(None, logits, LABELS, torch.randn(4, 5)).backward()
    else:
        MultiTokenLoss("bce")(logits, LABELS).backward()
    assert [name for name, p in pool.named_parameters() if p.grad is None] == []
    light = pool.eval().lighten()
    assert_close(aggregate(light.forward_groups(features)), light(features), "light answer", 1e-12)


class Teacher(nn.Module):
    """Linear in the mean colour; counts its calls and what it was called under."""

    def __init__(self, classes: int = 5, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.norm, self.fc, self.drop = nn.BatchNorm2d(3), nn.Linear(3, classes), nn.Dropout(0.5)
        self.to(dtype)
        self.calls = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        return 4 * self.fc(self.drop(self.norm(x).mean((2, 3))))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("label_loss", ["groups", "total", "sum"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("criterion", [ce, bce], ids=["ce", "bce"])
@pytest.mark.parametrize("average", [True, False], ids=["average", "no average"])
def test_distillation__equals_the_formulas(images, criterion, kind, label_loss, average):
    logits, target, teacher = draw(average=average, distill=True), soft_target(), Teacher()
    options = dict(intra=0.7, inter=-0.4, label_loss=label_loss)
    loss = MultiTokenDistillationLoss(criterion.__name__, teacher, 0.3, kind, 2.5, **options)
    says, d = teacher(images).detach(), logits.distill

    def learn(student: Tensor) -> Tensor:
        if kind == "hard":
            return criterion(student, torch.eye(5, dtype=torch.float64)[says.argmax(-1)])
        return 2.5**2 * kl(rows(says / 2.5), rows(student / 2.5), "batchmean")

    expected = reference(logits, target, criterion, **options)
    together = d.mean(1) if label_loss == "total" else d.sum(1)
    taught = sum(learn(d[:, g]) for g in range(3)) if label_loss == "groups" else learn(together)
    expected |= dict(label=expected["base"], teacher=taught, base=0.7 * expected["base"] + 0.3 * taught)
    if average:
        expected["intra"] = expected["intra"] + reference(GroupLogits(d, logits.average), target)["intra"]
    expected["total"] = expected["base"] + 0.7 * expected["intra"] - 0.4 * expected["inter"]
    parts = loss.parts(images, logits, target)
    assert_same_parts(parts, expected, logits)
    assert torch.equal(loss(images, logits, target), parts["total"])


def test_distillation__passes_the_options_on_and_its_hard_loss_follows_the_criterion(images):
    logits, target, teacher = draw(distill=True), LABELS, Teacher()
    options = dict(intra_direction="mean_to_tokens", inter_target="probability_mean", smoothing=0.1)
    parts = MultiTokenDistillationLoss("ce", teacher, **options).parts(images, logits, target)
    plain = MultiTokenLoss("ce", **options).parts(logits, target)
    assert torch.equal(parts["label"], plain["base"]) and torch.equal(parts["inter"], plain["inter"])
    y, a, _, d = logits
    intra = sum(kl(rows(a[:, g].detach()), rows(x[:, g])) for x in (y, d) for g in range(3))
    assert_close(parts["intra"], intra, "intra", 1e-12)
    with pytest.raises(TypeError, match="bananas"):
        MultiTokenDistillationLoss("ce", teacher, bananas=3)
    for criterion, given, expected in (
        ("ce", None, "ce"),
        ("bce", None, "bce"),
        (nn.BCEWithLogitsLoss(), None, "bce"),
        (BinaryCrossEntropy(), None, "bce"),
        (SoftTargetCrossEntropy(), None, "ce"),
        (nn.functional.binary_cross_entropy_with_logits, "bce", "bce"),
    ):
        logits, target = draw(distill=True), soft_target()
        loss = MultiTokenDistillationLoss(criterion, Teacher(), teacher_criterion=given)
        named = loss.ask_teacher(images).argmax(-1)
        parts = loss.parts(images, logits, target)
        taught = MultiTokenLoss(expected).parts(GroupLogits(logits.distill), named)["base"]
        assert_close(parts["teacher"], taught, "teacher", 1e-12)


def test_teacher__is_frozen_without_gradients_under_autocast_or_with_known_logits(images):
    teacher = Teacher().train()
    loss = MultiTokenDistillationLoss("ce", teacher)
    assert loss.teacher is teacher and not any(p.requires_grad for p in teacher.parameters())
    before = copy.deepcopy(teacher.state_dict())
    loss.train()
    images.requires_grad_()
    loss(images, draw(distill=True), LABELS).backward()
    teacher.train()  # by somebody else
    loss(images, draw(distill=True), LABELS).backward()
    assert teacher.calls == [(False, False)] * 2
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert images.grad is None and all(p.grad is None for p in teacher.parameters())
    # It is no part of the loss, but moves along
    loss = MultiTokenDistillationLoss("ce", Teacher(dtype=torch.float32), normalization=None)
    assert list(loss.parameters()) == [] and list(loss.buffers()) == [] and loss.state_dict() == {}
    assert not any(isinstance(module, Teacher) for module in loss.modules())
    loss.to(torch.bfloat16)
    assert {p.dtype for p in loss.teacher.parameters()} == {torch.bfloat16}
    assert loss.to("meta").teacher.fc.weight.device.type == "meta"
    assert copy.deepcopy(loss).teacher is not loss.teacher
    logits = GroupLogits(*(None if x is None else x.detach().bfloat16() for x in draw(distill=True)))
    loss = MultiTokenDistillationLoss("bce", Teacher(dtype=torch.float32), kind="soft")
    with torch.autocast("cpu", torch.bfloat16):
        parts = loss.parts(images.float(), logits, LABELS)
    assert {value.dtype for value in parts.values()} == {torch.float32}
    assert all(value.isfinite().all() for value in parts.values())
    logits, teacher, images = draw(distill=True), Teacher(), images.detach()
    expected = MultiTokenDistillationLoss("ce", teacher, kind="soft")(images, logits, LABELS)
    known = teacher(images).requires_grad_()
    loss = MultiTokenDistillationLoss("ce", None, kind="soft")
    got = loss(None, logits, LABELS, teacher_logits=known)
    assert torch.equal(got, expected) and loss.teacher is None
    got.backward()
    assert known.grad is None


def test_teacher__by_timm_name_or_from_a_run_folder_sees_images_normalised_its_own_way(tmp_path, monkeypatch):
    logits, asked = draw(2, classes=1000, distill=True, dtype=torch.float32), []
    loss = MultiTokenDistillationLoss("ce", "test_resnet", pretrained=False)
    assert type(loss.teacher).__name__ == "ResNet" and not loss.teacher.training
    assert loss(torch.randn(2, 3, 64, 64), logits, torch.tensor([3, 999])).isfinite()
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **kw: asked.append((name, kw)) or nn.Identity())
        names = ("volo_d1_224.sail_in1k", "volo_d1_224", "hf-hub:timm/test_resnet.r160_in1k")
        for name, options in zip(names, ({}, dict(pretrained=False), {}), strict=True):
            MultiTokenDistillationLoss("ce", name, **options)
            assert asked.pop() == (name, dict(pretrained=True) | options)
    model = timm.create_model("test_resnet", num_classes=5).eval()
    nn.init.normal_(model.fc.weight)
    save_for_hf(model, str(tmp_path / "run"), safe_serialization=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "model.safetensors"}
    images = torch.randn(4, 3, 64, 64)
    for folder in (tmp_path / "run", str(tmp_path / "run")):
        loss = MultiTokenDistillationLoss("ce", folder)
        assert torch.equal(loss.ask_teacher(images), model(images))
    assert loss(images, draw(distill=True), LABELS).isfinite()
    teacher = timm.create_model("test_resnet", num_classes=5).eval()
    teacher.pretrained_cfg.update(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    pixels = torch.rand(4, 3, 64, 64)

    def normalised(mean: tuple, std: tuple) -> Tensor:
        return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    ours = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    loss = MultiTokenDistillationLoss("ce", teacher, normalization=ours)
    assert loss.state_dict() == {}
    expected = teacher(normalised((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))).detach()
    assert_close(loss.ask_teacher(normalised(*ours)), expected, "logits", 1e-5)
    plain = MultiTokenDistillationLoss("ce", teacher)
    assert torch.equal(plain.ask_teacher(pixels), teacher(pixels))


def refuses(call, *words: str) -> None:
    message = refused("", call)
    assert all(word in message for word in words), message


TARGETS = [(torch.zeros(shape), (f"shape {shape}", "(4,)", "(4, 5)")) for shape in ((3,), (3, 5), (4, 6), (4, 1), ())]
TARGETS += [
    (torch.zeros(4), ("shape (4,)", "float32", "target.long()")),
    (torch.ones(4, dtype=torch.bool), ("bool", "target.long()")),
    (torch.ones(4, 5, dtype=torch.long), ("int64", "target.float()")),
    (torch.tensor([0, 1, 5, 2]), ("class 5", "0 to 4", "num_classes")),
    (torch.tensor([0, -1, 4, 2]), ("class -1", "0 to 4")),
    ([0, 1, 2, 3], ("a list", "(4,)")),
]
LOGITS = [
    (torch.zeros(4, 5), ("a tensor (4, 5)", "model(x, groups=True)")),
    ((torch.zeros(4, 2, 5), None), ("a tuple", "model(x, groups=True)")),
    (GroupLogits(None, torch.zeros(4, 2, 5)), ("light",)),
    (GroupLogits(torch.zeros(4, 5)), ("shape (4, 5)", "(images, groups, classes)")),
    (GroupLogits(torch.zeros(0, 2, 5)), ("shape (0, 2, 5)",)),
    (GroupLogits(torch.zeros(4, 2, 5), torch.zeros(4, 5)), ("group_logits.average", "(4, 5)", "(4, 2, 5)")),
    (GroupLogits(torch.zeros(4, 2, 5), distill=torch.zeros(4, 1, 5)), ("group_logits.distill", "(4, 1, 5)")),
]


def test_mistakes__targets_and_logits():
    for target, words in TARGETS:
        for criterion in ("ce", "bce"):
            refuses(partial(MultiTokenLoss(criterion), draw(), target), *words)
    taught = MultiTokenDistillationLoss("ce", Teacher())
    for logits, words in LOGITS:
        refuses(partial(MultiTokenLoss("ce"), logits, LABELS), *words)
        refuses(partial(taught, torch.zeros(4, 3, 6, 6), logits, LABELS), *words)


NO_NUMBERS = dict.fromkeys(("intra", "smoothing", "alpha"), math.nan) | dict(inter=-math.inf, temperature=math.inf)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(criterion="bcee"), ("criterion 'bcee'", "'bce'")),
        (dict(criterion=nn.CrossEntropyLoss), ("the class CrossEntropyLoss", "CrossEntropyLoss()")),
        (dict(criterion=3), ("criterion is a int", "'bce'")),
        *(({name: value}, (f"{name}={value}",)) for name, value in NO_NUMBERS.items()),
        (dict(inter="much"), ("inter='much'",)),
        (dict(label_loss="group"), ("label_loss 'group'", "did you mean 'groups'", "total")),
        (dict(intra_direction="mean_to_token"), ("intra_direction", "did you mean 'mean_to_tokens'")),
        (dict(inter_target="logits_mean"), ("inter_target", "did you mean 'logit_mean'", "probability_mean")),
        (dict(reduction="sum"), ("reduction 'sum'", "mean, batchmean")),
        (dict(reading="equation"), ("reading 'equation'", "did you mean 'equations'", "fitted")),
        (dict(stop_gradient="yes"), ("stop_gradient='yes'", "True or False")),
        (dict(smoothing=1.0), ("smoothing=1.0",)),
        (dict(criterion=nn.CrossEntropyLoss(), smoothing=0.1), ("smoothing=0.1", "'ce' and 'bce'")),
        # of distillation alone
        (dict(alpha=1.5), ("alpha=1.5", "between 0")),
        (dict(temperature=0.0), ("temperature=0.0", "above 0")),
        (dict(kind="softly"), ("kind 'softly'", "did you mean 'soft'")),
        (dict(teacher_criterion="mse"), ("teacher_criterion 'mse'", "ce, bce")),
        (dict(teacher="volo_d1_2244"), ("'volo_d1_2244'", "did you mean 'volo_d1_224'")),
        (dict(teacher="?"), ("'?'", "timm.list_models()")),
        (dict(teacher=Path("nowhere/at/all")), ("nowhere/at/all", "run folder")),
        (dict(teacher=7), ("teacher is a int", "run folder")),
        (dict(normalization=((0.5,) * 3, (0.5,) * 3)), ("normalization", "pretrained_cfg")),
    ],
    ids=str,
)
def test_mistakes__options(arguments, words):
    refuses(lambda: MultiTokenDistillationLoss(**{"criterion": "ce", "teacher": Teacher(), **arguments}), *words)
    if not arguments.keys() & {"alpha", "temperature", "kind", "teacher_criterion", "teacher", "normalization"}:
        refuses(lambda: MultiTokenLoss(**{"criterion": "ce", **arguments}), *words)


def test_mistakes__calls_folders_and_a_warning(images, tmp_path):
    loss = MultiTokenLoss(nn.CrossEntropyLoss(reduction="none"))
    refuses(lambda: loss(draw(), LABELS), "shape (4,)", "reduction='mean'")
    refuses(lambda: MultiTokenDistillationLoss("ce", tmp_path), str(tmp_path), "config.json")
    logits, loss = draw(distill=True), MultiTokenDistillationLoss("ce", Teacher())
    refuses(lambda: loss(images, draw(), LABELS), "group_logits.distill is None", "distill_tokens=1")
    refuses(lambda: loss(images[:3], logits, LABELS), "shape (3, 5)", "(4, 5)")
    refuses(lambda: loss(None, logits, LABELS), "images is None", "teacher_logits")
    refuses(lambda: loss(images, logits, LABELS[:3]), "target has shape (3,)")
    refuses(lambda: loss(None, logits, LABELS, torch.rand(4)), "shape (4,)", "(4, 5)")
    refuses(lambda: MultiTokenDistillationLoss("ce", None)(images, logits, LABELS), "teacher is None", "teacher_logits")
    other = MultiTokenDistillationLoss("ce", Teacher(classes=9))
    refuses(lambda: other(images, logits, LABELS), "9 classes", "student 5")

    class Pair(Teacher):
        def forward(self, x):
            return super().forward(x), None

    refuses(lambda: MultiTokenDistillationLoss("ce", Pair())(images, logits, LABELS), "returned a tuple", "(4, 5)")
    with pytest.warns(UserWarning, match="no lower bound") as caught:
        loss = MultiTokenLoss("ce", reduction="batchmean")
        for _ in range(3):
            loss(draw(), LABELS)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MultiTokenLoss("ce", reduction="batchmean", inter=0.5)
        MultiTokenLoss("ce")
