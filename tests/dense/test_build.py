"""One function for all dense models, and one name of timm's."""

import pytest
import timm
import torch

from broadsight.dense import HEADS, build, models_for
from broadsight.dense.build import USUAL, make_dense_model, neck_of
from broadsight.layers import MultiTokenNeck, PoolNeck
from broadsight.papers.macs import PRODUCTS, published_macs
from broadsight.surgery.pooling import swap_pool
from tests.compare import parameters
from tests.refusals import refused

TASKS = ("detect", "instances", "keypoints", "segment")


def test_build__passes_everything_on_and_models_for_a_task_have_the_usual_one_first():
    of_stages = dict(neck="tokens", neck_args=dict(dim=16, tokens=4, heads=2), backbone_args=dict(drop_path_rate=0.25))
    with torch.device("meta"):
        model = build("retinanet", "test_resnet", 5, in_chans=1, width=32, detections_per_img=7, **of_stages)
    assert model.stages.neck.learned.shape == (1, 4, 16)
    assert (model.stages.in_chans, model.detections_per_img, model.backbone.out_channels) == (1, 7, 32)
    assert any(getattr(module, "drop_prob", 0) for module in model.stages.modules())
    assert {task: models_for(task)[0] for task in TASKS} == USUAL
    assert sorted(name for task in TASKS for name in models_for(task)) == sorted(HEADS)


def test_neck__map_takes_the_tokens_of_a_pool_and_old_folders_mean_learned_ones():
    small = dict(head="semantic_fpn", backbone="test_resnet", num_classes=3, neck="map")
    pooled = make_dense_model(**small, pool="cap", broadcast=None, pool_args=dict(heads=2)).stages.neck
    assert isinstance(pooled, PoolNeck) and (pooled.pool.tokens, pooled.pool.blocks[0].heads) == (1, 2)
    old, new = dict(neck="map", neck_args={}), dict(neck="map", pool=None, pool_args={})
    assert [neck_of(one) for one in (old, new, {}, dict(neck="fpn"))] == ["tokens", "map", "fpn", "fpn"]
    read = timm.create_model("dense_model", **small, neck_args={"tokens": 4}, pretrained_cfg={"num_classes": 3})
    assert isinstance(read.stages.neck, MultiTokenNeck)
    refused("pool='map' given with neck='fpn'; it is for", make_dense_model, **small | dict(neck="fpn"), pool="map")


# Millions of parameters, and billions of multiply-accumulates at 2048x512 or 256x192: each head once, exactly. Those of
# all published tables, which round, are counted in tests/papers.
SIZES = {
    "retinanet emsnet_xxtiny": (11.74,),
    "ssdlite partialformer_b0": (5.024,),
    "rtdetr resnet50": (42.925,),
    "mask_rcnn emsnet_tiny": (25.263,),
    "cascade_mask_rcnn convnext_tiny": (85.944,),
    "cascade_mask_rcnn convnext_tiny box_head=fc": (82.008,),
    "cascade_mask_rcnn convnext_tiny class_agnostic=True": (84.96,),
    "cascade_mask_rcnn convnext_tiny masks_on=last": (80.657,),
    "semantic_fpn mat_3": (19.497,),
    "upernet partialformer_b2": (48.568, 886.87),
    "simple_baseline partialformer_b1": (9.778, 1.757),
}
CLASSES = {"segment": (150, (2048, 512)), "keypoints": (1, (256, 192))}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_macs__are_those_of_the_papers(name):
    head, backbone, *options = name.split()
    if head == "rtdetr":  # the paper has 42 M with a ResNet-50 of its own
        pytest.importorskip("transformers")
    classes, size = CLASSES.get(HEADS[head].task, (80, None))
    given = {key: value == "True" or value for key, _, value in (option.partition("=") for option in options)}
    with torch.device("meta"):
        model = build(head, backbone, classes, **given)
    millions, *macs = SIZES[name]
    assert parameters(model) / 1e6 == pytest.approx(millions, abs=0.00051)
    if macs:
        within = 0.0005 if head == "simple_baseline" else 0.005
        assert published_macs(model, size, PRODUCTS) / 1e9 == pytest.approx(*macs, abs=within)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("retina", "test_resnet", 3), {}, "unknown dense model 'retina'; did you mean 'retinanet'[?] expected one of"),
        (("retinanet", "test_resnet", 0), {}, "num_classes=0; expected the number of classes, 1 or more"),
        (("retinanet", "test_resnet", 2.5), {}, "num_classes=2.5; expected"),
        (("retinanet", "test_resnet", 3), dict(wings=2), "retinanet cannot be built: .*unexpected keyword .*wings"),
        (("semantic_fpn", "test_resnet", 3), dict(wings=2), "semantic_fpn cannot be built: .*keyword .*wings"),
        (("retinanet", "test_resnet", 3), dict(neck="pan"), "unknown neck 'pan'; "),
        (("retinanet", "no_such_net", 3), {}, "unknown model 'no_such_net'"),
        (("retinanet", swap_pool("test_resnet", "gap"), 3), dict(neck="map"), ".* AveragePool has none; pool"),
    ],
)
def test_build__refuses(arguments, options, message):
    refused(f"^{message}", build, *arguments, **options)


SMALL = dict(head="retinanet", backbone="test_resnet", head_args=dict(width=32, image_size=[64, 96]))


def test_dense_model__is_what_timm_makes_with_context_and_for_grey_images():
    model = timm.create_model("dense_model", num_classes=4, **SMALL)
    assert (model.task, model.num_classes, model.backbone.out_channels) == ("detect", 4, 32)
    assert "dense_model" in timm.list_models() and model.eval()([torch.rand(3, 50, 70)])[0]["boxes"].shape[1] == 4
    options = dict(backbone_args=dict(in_chans=1), head_args=dict(pyramid_channels=32, channels=16))
    model = make_dense_model("semantic_fpn", "test_vit", 2, broadcast="scaled", **options)
    new = model.state_dict().keys() - make_dense_model("semantic_fpn", "test_vit", 2, **options).state_dict().keys()
    assert new and all(name.startswith("stages.network.") for name in new)
    assert model.eval()(torch.rand(1, 1, 48, 64)).shape == (1, 2, 48, 64)


@pytest.mark.parametrize("given", [{}, dict(head="retinanet"), dict(backbone="test_resnet")])
def test_dense_model__is_none_by_itself(given):
    words = "dense_model is no model by itself; give head=, such as 'retinanet'"
    refused(words, timm.create_model, "dense_model", **given)
