"""Channel and spatial variance by hand, and against torch.var image by image."""

import json

import pytest
import torch
from torch import Tensor

from broadsight.analysis import FeatureVariance, LayerVariance, feature_variance, plot_feature_variance
from broadsight.inspection.blocks import find_blocks, watch_blocks
from broadsight.inspection.passing import pass_images
from tests.analysis.measures.toy_models import Blocks
from tests.inspection.timm_models import created, images
from tests.training.small_runs import refusal
from tests.zoo import shallow


def doubling() -> Blocks:
    return Blocks(lambda x: x, 2)


# Two channels at 1x2 places of an image: 1 3 and 5 11.
IMAGE = torch.tensor([[[[1.0, 3.0]], [[5.0, 11.0]]]])


def test_by_hand():
    """Doubled: 2 6 and 10 22. Variances of 2 10 and of 6 22: 32 and 128; of 2 6 and of 10 22: 8 and 72."""
    found = feature_variance(doubling(), IMAGE)
    first, second = found.layers
    relative = pytest.approx(80 / 156), pytest.approx(40 / 156)
    assert first == LayerVariance("blocks.0", 80, 40, *relative, channels=2, grid=(1, 2))
    assert second == LayerVariance("blocks.1", 320, 160, *relative, channels=2, grid=(1, 2))
    assert (found.images, found.correction) == (1, 1)
    biased = feature_variance(doubling(), IMAGE, correction=0).layers[0]
    assert (biased.channel, biased.spatial) == (40, 20)
    # a second image of 0: half of all; the relative values are means of those of the images
    layer = feature_variance(doubling(), torch.cat([IMAGE, 0 * IMAGE]), batch_size=1).layers[0]
    assert (layer.channel, layer.spatial, layer.relative_channel) == pytest.approx((40, 20, 40 / 156))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mat_1"])
def test_against_torch(name):
    model = shallow(name).eval() if name == "mat_1" else created(name)
    x = torch.randn(5, 3, 64, 64)
    blocks, wanted = find_blocks(model, x), {}

    def see(number: int, features: Tensor) -> None:
        for image in features.double():  # C h w
            values = image.var(0).mean(), image.flatten(1).var(1).mean()
            wanted.setdefault(number, []).append(torch.stack(values))

    with watch_blocks(model, blocks, see):
        pass_images(model, x)
    counts = []
    loader = ((part, torch.zeros(len(part))) for part in x.split(2))
    found = feature_variance(model, loader, batch_size=2, seen=counts.append)
    assert counts == [2, 4, 5]
    for number, layer in enumerate(found.layers):
        channel, spatial = torch.stack(wanted[number]).mean(0).tolist()
        assert (layer.channel, layer.spatial) == pytest.approx((channel, spatial), rel=1e-5)


def test_large_offsets_half_precision_and_bad_input():
    x = torch.randn(1, 2, 8, 8) + 1000
    layer = feature_variance(doubling().double(), x.double()).layers[0]
    single = feature_variance(doubling(), x).layers[0]
    assert single.spatial == pytest.approx(layer.spatial, rel=1e-4)
    model = created("resnet10t").to(torch.bfloat16)
    assert all(layer.channel > 0 for layer in feature_variance(model, images("resnet10t")).layers)
    said = refusal(lambda: feature_variance(doubling(), IMAGE, correction=2))
    assert said.startswith("blocks.0 has 2 channels at 2 places, too few for correction=2; pass")
    assert "correction=-1; expected a whole number" in refusal(lambda: feature_variance(None, IMAGE, correction=-1))


def test_record_and_plot():
    one = feature_variance(doubling(), IMAGE)
    record = json.loads(json.dumps(one.record()))
    assert record["layers"][0]["grid"] == [1, 2] and record["layers"][1]["spatial"] == 160
    other = FeatureVariance(one.layers[:1], 1, 1)
    figure = plot_feature_variance({"a": one, "b": other}, relative=True)
    assert [panel.get_title() for panel in figure.axes] == ["channel diversity", "spatial diversity"]
    assert [list(line.get_ydata()) for line in plot_feature_variance({"a": one}).axes[0].lines] == [[80, 320]]
