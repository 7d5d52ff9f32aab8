"""Weights that a user gives: of the same model, of other classes, or of what is under a swapped pooling."""

import pytest
import timm
import torch
from torch.testing import assert_close

from broadsight import swap_pool
from broadsight.weights.loading import load_given
from broadsight.weights.writing import write_weights

from ..training.small_runs import SMALL_POOL, refusal


@pytest.fixture
def file(tmp_path):
    """Weights of a model with five classes."""
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=5)
    write_weights(model, tmp_path / "five.safetensors")
    return tmp_path / "five.safetensors", model.state_dict()


def test_other_classes_or_a_swapped_pool__the_backbone_takes_its_own_weights_not_those_of_another(file):
    path, weights = file
    model = timm.create_model("test_resnet", num_classes=3)
    before = model.fc.weight.clone()
    load_given(model, path, other_classes=True)
    assert torch.equal(model.fc.weight, before)
    kept, expected = ({k: v for k, v in one.items() if "fc" not in k} for one in (model.state_dict(), weights))
    assert_close(kept, expected)
    assert "holds weights of another model" in refusal(lambda: load_given(model, path))
    for pool, options in dict(map=SMALL_POOL, gap={}).items():
        model = swap_pool("test_resnet", pool, num_classes=3, **options)
        pooling = {name: value.clone() for name, value in model.head.state_dict().items()}
        load_given(model, path, other_classes=True)
        for name, value in model.backbone.state_dict().items():
            assert torch.equal(value, weights[name]), name
        assert_close(model.head.state_dict(), pooling)
        assert "holds weights of another model" in refusal(lambda model=model: load_given(model, path))
    write_weights(timm.create_model("test_vit"), file[0].with_name("vit.safetensors"))
    said = refusal(lambda: load_given(model, file[0].with_name("vit.safetensors"), other_classes=True))
    assert "holds weights of another model" in said
