"""Losses of a step against formulas written out here; who learns from a teacher, and who must not."""

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.losses import MultiTokenLoss, aggregate
from broadsight.models.edited import edit
from broadsight.training.objectives.steps import HardDistillationTask, LabelLoss, MultiTokenTask, make_task
from broadsight.training.recipes import Recipe

from ...test_losses import bce, ce
from ..small_runs import SMALL_POOL, leave_run, offline_hub

CPU = torch.device("cpu")
B, C = 4, 3
OTHER = dict(mean=[0.1, 0.2, 0.3], std=[0.3, 0.2, 0.1])


def images() -> tuple[Tensor, Tensor]:
    """Different enough for a model without training to tell them apart."""
    return torch.randn(B, 3, 32, 32) + 3 * torch.randn(B, 3, 1, 1), torch.tensor([0, 2, 1, 2])


def one_hot(labels: Tensor, smoothing: float = 0.0) -> Tensor:
    return torch.eye(C)[labels] * (1 - smoothing) + smoothing / C


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * (p.exp() * (p - q)).sum() / len(p)


def step(student: nn.Module, **settings) -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    task = make_task(student, student, Recipe(**settings), CPU)
    x, labels = images()
    torch.manual_seed(7)  # of dropout
    result = task(x, labels)
    torch.manual_seed(7)
    return task, result, x, labels


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> tuple[str, nn.Module]:
    """A run folder whose model takes images normalised in its own way, and the model."""
    torch.manual_seed(0)
    folder, teacher = leave_run(tmp_path_factory.mktemp("teacher") / "run", num_classes=C, **OTHER)
    return str(folder), teacher


def as_the_teacher_takes_them(x: Tensor) -> Tensor:
    """From the student's 0.5, 0.5."""
    mean, std = (torch.tensor(OTHER[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (0.5 * x + 0.5 - mean) / std


def answers(teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return teacher(as_the_teacher_takes_them(x))


def check_only_the_student_learns(loss: Tensor, student: nn.Module, teacher: nn.Module) -> None:
    loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert not teacher.training and student.training


@pytest.mark.parametrize(("kind", "formula"), [("ce", ce), ("bce", bce)])
def test_labels(kind, formula):
    logits, labels = torch.randn(B, C), torch.tensor([0, 2, 1, 2])
    soft = torch.rand(B, C).softmax(-1)  # mixing has smoothed them already
    for smoothing in (0.0, 0.1):
        loss = LabelLoss(kind, smoothing)
        torch.testing.assert_close(loss(logits, labels), formula(logits, one_hot(labels, smoothing)))
        torch.testing.assert_close(loss(logits, soft), formula(logits, soft))
    torch.manual_seed(1)
    student = timm.create_model("test_vit", num_classes=C, img_size=32)
    _, result, x, labels = step(student, loss=kind, smoothing=0.2)
    torch.testing.assert_close(result["output"], student(x))
    torch.testing.assert_close(result["loss"], formula(student(x), one_hot(labels, 0.2)))


@pytest.mark.parametrize("pool", ["map", "ga"])
@pytest.mark.parametrize("kind", ["ce", "bce"])
def test_multi_token__is_its_loss(pool, kind):
    student = edit("test_vit", pool=pool, pool_args=SMALL_POOL, num_classes=C, img_size=32)
    task, result, x, labels = step(student, loss=kind, smoothing=0.1, intra=0.7, inter=-0.3)
    assert type(task) is MultiTokenTask
    groups = student(x, groups=True)
    parts = MultiTokenLoss(kind, 0.7, -0.3, smoothing=0.1).parts(groups, labels)
    torch.testing.assert_close(result["loss"], parts["total"])
    torch.testing.assert_close(result["output"], aggregate(groups))
    for name in ("base", "intra", "inter"):
        torch.testing.assert_close(result[name], parts[name])
    soft = torch.rand(B, C).softmax(-1)
    torch.manual_seed(7)
    torch.testing.assert_close(task(x, soft)["loss"], MultiTokenLoss(kind, 0.7, -0.3)(groups, soft))
    result["loss"].backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize(
    "options",
    [
        dict(reading="equations"),
        dict(label_loss="total"),
        dict(intra_direction="mean_to_tokens"),
        dict(inter_target="logit_sum"),
        dict(reduction="batchmean"),
        dict(stop_gradient=False),
        dict(reading="equations", stop_gradient=True),
    ],
    ids=str,
)
def test_multi_token__has_the_options_of_the_recipe(options):
    """Those that change no value change a gradient."""
    student = edit("test_vit", pool="map", pool_args=SMALL_POOL, num_classes=C, img_size=32)
    settings = {"loss_reading" if name == "reading" else name: value for name, value in options.items()}
    _, result, x, labels = step(student, inter=0.4, **settings)
    weights = list(student.parameters())

    def gradients(loss: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])

    expected = MultiTokenLoss("ce", 1.0, 0.4, **options)(student(x, groups=True), labels)
    other = MultiTokenLoss("ce", 1.0, 0.4)(student(x, groups=True), labels)
    torch.testing.assert_close(result["loss"], expected)
    learned, taught = gradients(result["loss"]), gradients(expected)
    torch.testing.assert_close(learned, taught)
    assert (learned - gradients(other)).norm() > 1e-3 * learned.norm()


def test_hard_and_soft__label_and_named_class_or_divergence(taught):
    torch.manual_seed(1)
    student = timm.create_model("test_vit", num_classes=C, img_size=32)
    task, result, x, labels = step(student, distill="hard", teacher=taught[0], alpha=0.3, smoothing=0.1, loss="bce")
    assert type(task) is HardDistillationTask
    logits, named = student(x), answers(taught[1], x).argmax(-1)
    with torch.no_grad():
        assert not torch.equal(named, taught[1](x).argmax(-1))  # or the normalisation would not matter here
    expected = 0.7 * bce(logits, one_hot(labels, 0.1)) + 0.3 * ce(logits, one_hot(named))
    torch.testing.assert_close(result["loss"], expected)
    check_only_the_student_learns(result["loss"], student, task.teacher.model)
    student = timm.create_model("test_vit", num_classes=C, img_size=32)
    task, result, x, labels = step(student, distill="soft", teacher=taught[0], alpha=0.3, temperature=2.0)
    logits = student(x)
    expected = 0.7 * ce(logits, one_hot(labels)) + 0.3 * divergence(answers(taught[1], x), logits, 2.0)
    torch.testing.assert_close(result["loss"], expected)
    check_only_the_student_learns(result["loss"], student, task.teacher.model)


def distilled_vit() -> nn.Module:
    small = dict(embed_dim=24, depth=2, num_heads=3, img_size=32)
    model = edit("deit_tiny_distilled_patch16_224", num_classes=C, **small)
    model.pretrained_cfg = dict(model.pretrained_cfg) | dict(mean=(0.5,) * 3, std=(0.5,) * 3)
    return model


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_token__the_distillation_token_learns_from_the_teacher(taught, kind):
    student = distilled_vit()
    task, result, x, labels = step(student, distill=kind, teacher=taught[0], alpha=0.3, temperature=2.0)
    logits, distilled = student(x)
    seen = answers(taught[1], x)
    lesson = ce(distilled, one_hot(seen.argmax(-1))) if kind == "hard" else divergence(seen, distilled, 2.0)
    torch.testing.assert_close(result["loss"], 0.7 * ce(logits, one_hot(labels)) + 0.3 * lesson)
    torch.testing.assert_close(result["output"], logits)
    check_only_the_student_learns(result["loss"], student, task.teacher.model)
    assert student.eval()(x).shape == (B, C)  # evaluation sees one answer


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_multi_token__distillation_tokens_learn_from_the_teacher(taught, kind):
    """A convolutional student of a transformer or the other way round, as the papers have it."""
    pool_args = {**SMALL_POOL, "pool_options": {"distill_tokens": 1}}
    student = edit("test_resnet", pool="map", pool_args=pool_args, num_classes=C).train()
    options = dict(alpha=0.3, temperature=2.0, intra=0.0, inter=0.0)
    task, result, x, labels = step(student, distill=kind, teacher=taught[0], **options)
    seen = answers(taught[1], x)
    torch.manual_seed(7)
    groups = student(x, groups=True)
    expected = torch.zeros(())
    for group in range(groups.tokens.shape[1]):
        distilled = groups.distill[:, group]
        lesson = ce(distilled, one_hot(seen.argmax(-1))) if kind == "hard" else divergence(seen, distilled, 2.0)
        expected = expected + 0.7 * ce(groups.tokens[:, group], one_hot(labels)) + 0.3 * lesson
    torch.testing.assert_close(result["loss"], expected)
    torch.testing.assert_close(result["output"], (groups.tokens + groups.distill).mean(1) / 2)
    teacher = task.criterion.teacher
    assert teacher is not None and not any(name.startswith("criterion") for name, _ in task.named_parameters())
    result["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert next(student.parameters()).grad is not None


def test_teacher__of_grey_images_and_of_no_student_in_eval_mode(tmp_path):
    folder, grey = leave_run(tmp_path / "run", num_classes=C, mean=[0.4], std=[0.2], model_args={"in_chans": 1})
    leave_run(tmp_path / "own", num_classes=C)
    student = timm.create_model("test_resnet", num_classes=C, in_chans=1)
    student.pretrained_cfg = dict(student.pretrained_cfg) | dict(mean=(0.5,), std=(0.5,))  # as `prepare` must see to
    task = make_task(student, student, Recipe(distill="soft", teacher=str(folder)), CPU)
    x, labels = torch.randn(B, 1, 32, 32), torch.tensor([0, 2, 1, 2])
    result = task(x, labels)
    with torch.no_grad():
        seen = grey((0.5 * x + 0.5 - 0.4) / 0.2)
    expected = 0.5 * ce(student(x), one_hot(labels)) + 0.5 * divergence(seen, student(x), 3.0)
    torch.testing.assert_close(result["loss"], expected)
    student = distilled_vit().eval()  # which gives one answer instead of two
    with pytest.raises(ValueError, match="frozen_stats"):
        make_task(student, student, Recipe(distill="hard", teacher=str(tmp_path / "own"), frozen_stats=True), CPU)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("test_resne", "teacher 'test_resne' is neither a model of timm nor a run folder; did you mean 'test_resnet"),
        ("{run}", "knows 3 classes, the data has 5; train a teacher on this data first"),
        ("{empty}", "has no config.json; expected a run folder"),
        ("test_vit", "^the weights of teacher 'test_vit' cannot be loaded: [^\n]+$"),  # offline here
        ("{broken}", r"^the weights of teacher .* cannot be loaded: [^\n]+$"),
    ],
)
def test_teacher__refused(taught, tmp_path, monkeypatch, teacher, message):
    offline_hub(monkeypatch)
    student = timm.create_model("test_resnet", num_classes=5)
    broken, _ = leave_run(tmp_path / "run", num_classes=5)
    (broken / "model.safetensors").write_bytes(b"nothing")
    name = teacher.format(run=taught[0], empty=tmp_path, broken=broken)
    with pytest.raises(ValueError, match=message):
        make_task(student, student, Recipe(distill="hard", teacher=name), CPU)
