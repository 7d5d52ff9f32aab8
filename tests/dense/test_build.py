"""One function for all dense models."""

import pytest
import torch

from broadsight.dense import MODELS, build, models_for
from broadsight.dense.build import USUAL, builder
from tests.refusals import refused

TASKS = ("detect", "instances", "keypoints", "segment")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rtdetr"])  # which needs an extra, and is slow
def test_build__every_model_has_its_task_and_backbone(name):
    with torch.device("meta"):
        model = build(name, "test_resnet", 3)
    assert (model.task, model.num_classes) == (MODELS[name], 3)
    assert model.stages.strides == (4, 8, 16, 32)


def test_models_for__the_usual_one_first_and_each_once():
    assert {task: models_for(task)[0] for task in TASKS} == USUAL
    assert sorted(name for task in TASKS for name in models_for(task)) == sorted(MODELS)


def test_build__passes_everything_on():
    with torch.device("meta"):
        model = build(
            "retinanet",
            "test_resnet",
            5,
            neck="map",
            neck_args=dict(dim=16, tokens=4, heads=2),
            in_chans=1,
            backbone_args=dict(drop_path_rate=0.25),
            width=32,
            detections_per_img=7,
        )
    assert model.stages.neck.learned.shape == (1, 4, 16)
    assert (model.stages.in_chans, model.detections_per_img, model.backbone.out_channels) == (1, 7, 32)
    assert any(getattr(module, "drop_prob", 0) for module in model.stages.modules())


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("retina", "test_resnet", 3), {}, "unknown dense model 'retina'; did you mean 'retinanet'[?] models are"),
        (("retinanet", "test_resnet", 0), {}, "num_classes=0; expected the number of classes, 1 or more"),
        (("retinanet", "test_resnet", 2.5), {}, "num_classes=2.5; expected"),
        (("retinanet", "test_resnet", 3), dict(wings=2), "retinanet cannot be built: .*unexpected keyword .*wings"),
        (("semantic_fpn", "test_resnet", 3), dict(wings=2), "semantic_fpn cannot be built: .*keyword .*wings"),
        (("retinanet", "test_resnet", 3), dict(neck="pan"), "neck='pan' is not known"),
        (("retinanet", "no_such_net", 3), {}, "unknown model 'no_such_net'"),
    ],
)
def test_build__refuses(arguments, options, message):
    refused(f"^{message}", build, *arguments, **options)


def test_builder__finds_all():
    assert all(callable(builder(name)) for name in MODELS)
