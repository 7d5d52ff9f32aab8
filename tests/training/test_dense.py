"""Dense tasks through the one engine: folders, reloading, resuming, beginning from other weights, and refusals."""

import json
import os
import signal
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image

import broadsight
from broadsight.runs import task_of
from broadsight.runs.dense_model import open_dense
from broadsight.training.engine import Interrupted
from broadsight.training.objectives.dense import DenseWork
from broadsight.training.request import Request
from broadsight.training.run import train

from .dense_runs import SMALL_HEADS, TASKS, ask_dense, write_coco
from .runs import left_by, lines_of

GOALS = {"retinanet": "box_ap", "mask_rcnn": "mask_ap", "semantic_fpn": "miou", "simple_baseline": "keypoint_ap"}


@pytest.fixture(scope="module", params=SMALL_HEADS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / request.param
    outcome = train(ask_dense(request.param, folder))
    return request.param, folder, outcome


def test_run__is_a_folder_with_everything_that_loads_with_timm(run):
    head, folder, outcome = run
    config = json.loads((folder / "config.json").read_text("utf-8"))
    about = config["broadsight"]
    assert (about["task"], about["goal"], about["settings"]["head"]) == (TASKS[head], GOALS[head], head)
    assert config["label_names"][-1] == "rocket" or "rocket" in config["label_names"]
    assert ("background" in config["label_names"]) == (head == "semantic_fpn")
    (epoch,) = lines_of(folder, "epoch")
    assert 0 <= epoch[f"val_{GOALS[head]}"] <= 100 and "train_top1" not in epoch
    assert outcome.progress.best == epoch[f"val_{GOALS[head]}"]
    assert outcome.goal in ("box AP", "mask AP", "mIoU", "keypoint AP")
    assert {"model.safetensors", "metrics.jsonl", "last"} <= {path.name for path in folder.iterdir()}
    assert task_of(folder) == TASKS[head]
    opened = open_dense(folder)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    for name, value in model.state_dict().items():
        assert torch.equal(value, opened.model.state_dict()[name])
    image = torch.rand(3, 64, 64)
    images = [image] if TASKS[head] in ("detect", "instances") else image[None]
    with torch.no_grad():
        one, other = model(images), opened.model(images)
    if isinstance(one, list):
        assert all(torch.equal(one[0][key], other[0][key]) for key in one[0])
    else:
        assert torch.equal(one, other)


@pytest.mark.parametrize("head", ["retinanet", pytest.param("semantic_fpn", marks=pytest.mark.slow)])
def test_resume__as_if_it_had_never_stopped(head, tmp_path, monkeypatch):
    """Stopped by a signal in the middle of an epoch; losses, weights and figures are the same to the last bit."""
    request = ask_dense(head, tmp_path / "whole", changes=dict(epochs=2))
    train(request)
    step, made = DenseWork.step, []

    def interrupting(self, batch):
        made.append(1)
        if len(made) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(DenseWork, "step", interrupting)
    halved = replace(request, out=str(tmp_path / "halved"))
    with pytest.raises(Interrupted, match="--resume"):
        train(halved)
    monkeypatch.setattr(DenseWork, "step", step)
    train(replace(halved, resume=True))
    assert left_by(tmp_path / "halved") == left_by(tmp_path / "whole")


def test_init__from_a_classifier_whatever_its_pooling_or_a_detector_and_resume__what_is_another_run(tmp_path, run):
    head, folder, _ = run
    if head != "retinanet":
        pytest.skip("the same for every head")
    torch.manual_seed(1)
    classifier = broadsight.swap_pool("test_resnet", "map", groups=2, tokens=1, dim=24, num_classes=3)
    torch.save(classifier.state_dict(), tmp_path / "classifier.pth")
    still = dict(lr=1e-12, min_lr=0.0)
    train(ask_dense("retinanet", tmp_path / "run", init=str(tmp_path / "classifier.pth"), changes=still))
    opened = open_dense(tmp_path / "run")
    kept = classifier.backbone.state_dict()
    for name, value in opened.model.stages.network.named_parameters():
        torch.testing.assert_close(value, kept[name], atol=1e-6, rtol=0)
    pool = dict(pool="map", pool_args=dict(groups=2, tokens=1, dim=24))
    fed = ask_dense("retinanet", tmp_path / "fed", neck="map", init=str(tmp_path / "classifier.pth"), changes=still)
    with pytest.raises(ValueError, match=r"holds weights of another pool: .*give --pool and --pool-args"):
        train(fed)
    assert f"begins from the backbone and pool of {tmp_path}/classifier.pth" in train(replace(fed, **pool)).notes
    opened, own = open_dense(tmp_path / "fed"), classifier.head.state_dict()
    same = timm.create_model(f"local-dir:{tmp_path / 'fed'}", pretrained=True).stages.neck.state_dict()
    for name, value in opened.model.stages.neck.pool.state_dict().items():
        torch.testing.assert_close(value, own[name], atol=1e-6, rtol=0)
        assert torch.equal(value, same[f"pool.{name}"])
    again = ask_dense("retinanet", tmp_path / "again", init=str(folder), changes=still)
    note = [note for note in train(again).notes if "begins from" in note]
    assert note and "begin anew" not in note[0]
    torch.save({"stem.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="holds weights of another model"):
        train(ask_dense("retinanet", tmp_path / "no", init=str(tmp_path / "other.pth")))
    assert not (tmp_path / "no").exists()
    # Another task or head is another run
    with pytest.raises(ValueError, match="holds a run with head=retinanet, not head=fcos"):
        train(replace(replace(ask_dense("retinanet", folder), head="fcos"), resume=True))
    with pytest.raises(ValueError, match="holds a run with task=detect, not task=segment"):
        train(replace(replace(ask_dense("retinanet", folder), task="segment", head=None), resume=True))


def test_train__refuses_options_and_labels_that_cannot_be_meant_and_leaves_nothing(tmp_path):
    for options, message in (
        (dict(pool="map"), "--pool map with --task detect, where nothing is pooled; --neck map"),
        (dict(head="mask_rcnn"), "--head mask_rcnn with --task detect; expected retinanet, "),
        (dict(changes=dict(mixup=0.5)), "mixup=0.5 is for --task classify; this is --task detect"),
        (dict(recipe="quick"), "recipe quick is for --task classify, not detect"),
        (dict(head_args=dict(wings=2)), "retinanet cannot be built: .*wings"),
        (dict(data="nowhere"), "no such data: nowhere"),
        (dict(model="resnet1"), "unknown model 'resnet1'"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^{message}"):
            train(replace(ask_dense("retinanet", tmp_path / "run", changes=options.pop("changes", {})), **options))
    with pytest.raises(ValueError, match="--neck is for dense tasks; this is --task classify"):
        train(Request(data="scenes:8", neck="map", out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    (tmp_path / "images").mkdir(), (tmp_path / "masks").mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40)).save(tmp_path / "images" / f"{number}.png")
        Image.new("L", (40, 40), 9 if number == 2 else 1).save(tmp_path / "masks" / f"{number}.png")
    (tmp_path / "classes.txt").write_text("ground\nthing\n")
    with pytest.raises(ValueError, match=r"2\.png holds 9, which is none of the 2 classes"):
        train(ask_dense("semantic_fpn", tmp_path / "run", data=str(tmp_path)))
    assert not (tmp_path / "run").exists()
    file = write_coco(tmp_path / "coco")
    content = json.loads(file.read_text("utf-8"))
    content["images"][1]["width"] = 500
    file.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=r"000000000002\.png has 80x64 pixels but annotations.json says 500x64"):
        train(ask_dense("retinanet", tmp_path / "run", data=str(file)))
    assert not (tmp_path / "run").exists()
