"""Dense models under one name of timm's."""

import pytest
import timm
import torch

import broadsight  # noqa: F401
from broadsight.dense.build import make_dense_model

SMALL = dict(head="retinanet", backbone="test_resnet", head_args=dict(width=32, image_size=[64, 96]))


def test_dense_model__is_what_timm_makes():
    model = timm.create_model("dense_model", num_classes=4, **SMALL)
    assert (model.task, model.num_classes, model.backbone.out_channels) == ("detect", 4, 32)
    assert "dense_model" in timm.list_models()
    found = model.eval()([torch.rand(3, 50, 70)])
    assert found[0]["boxes"].shape[1] == 4


def test_dense_model__broadcasts_context_and_takes_grey_images():
    options = dict(backbone_args=dict(in_chans=1), head_args=dict(pyramid_channels=32, channels=16))
    model = make_dense_model("semantic_fpn", "test_vit", 2, broadcast="scaled", **options)
    new = model.state_dict().keys() - make_dense_model("semantic_fpn", "test_vit", 2, **options).state_dict().keys()
    assert new and all(name.startswith("stages.network.") for name in new)
    assert model.eval()(torch.rand(1, 1, 48, 64)).shape == (1, 2, 48, 64)


@pytest.mark.parametrize("given", [{}, dict(head="retinanet"), dict(backbone="test_resnet")])
def test_dense_model__is_none_by_itself(given):
    with pytest.raises(ValueError, match="dense_model is no model by itself; give head=, such as 'retinanet'"):
        timm.create_model("dense_model", **given)
