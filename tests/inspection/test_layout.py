"""Layouts guessed from shapes, and the maps that are read by them."""

import pytest
import timm
import torch
from torch import nn

from broadsight.inspection.layout import Layout, layouts_of, path_of, prefix_tokens


@pytest.mark.parametrize(
    ("tokens", "prefixes", "size", "expected"),
    [
        (197, [1, 0], (224, 224), (1, 14, 14)),
        (196, [1, 0], (224, 224), (0, 14, 14)),  # CaiT's class token comes late
        (730, [1, 0], (224, 224), (1, 27, 27)),
        (99, [1, 0], (112, 224), (1, 7, 14)),
        (50, [1, 0], (224, 224), (1, 7, 7)),
        (48, [0], (250, 190), (0, 8, 6)),
        (42, [0], (250, 190), (0, 7, 6)),
        (1, [0], (32, 32), (0, 1, 1)),
        (17, [0], (224, 224), None),
        (32, [0], (224, 224), None),
        (21, range(17), (64, 64), (5, 4, 4)),  # four registers and a class token
        (0, [0, 1], (32, 32), None),
    ],
)
def test_tokens__are_a_grid_in_the_proportions_of_the_image(tokens, prefixes, size, expected):
    found = layouts_of((2, tokens, 8), size, prefixes=prefixes)
    assert [(one.form, one.prefix, *one.grid) for one in found[:1]] == ([("NLC", *expected)] if expected else [])


def test_maps__channels_first_or_last_or_the_nearest_where_nothing_fits():
    for shape, form, expected in (
        ((2, 8, 4, 6), None, ["NCHW"]),
        ((2, 4, 6, 32), None, ["NHWC"]),
        ((2, 5, 7, 8), None, ["NHWC"]),  # of 64x96 at stride 14, rounded up
        ((2, 6, 9, 13), None, ["NCHW", "NHWC"]),
        ((2, 6, 9, 13), "NHWC", ["NHWC", "NCHW"]),
        *(((2, 8, 16, 2), None, []), ((2, 8), None, [])),
    ):
        assert [one.form for one in layouts_of(shape, (64, 96), form=form)] == expected
    assert layouts_of((1, 17, 8), (64, 64), prefixes=[0], nearest=True)[0].grid in ((1, 17), (17, 1))
    assert layouts_of((2, 3, 5, 30), (64, 64), nearest=True)[0] == Layout("NHWC", (3, 5))


@pytest.mark.parametrize("layout", [Layout("NCHW", (2, 3)), Layout("NHWC", (2, 3)), Layout("NLC", (2, 3), 2)])
def test_as_map__is_a_view_of_the_places(layout):
    expected = torch.randn(4, 5, 2, 3)
    tokens = torch.cat([torch.randn(4, 2, 5), expected.flatten(2).mT], 1)
    x = {"NCHW": expected, "NHWC": expected.permute(0, 2, 3, 1).contiguous(), "NLC": tokens}[layout.form]
    found = layout.as_map(x)
    assert layout.suits(x) and layout.places == 6 and torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert not layout.suits(x[..., 0])


def test_prefix_tokens__are_what_the_nearest_owner_says():
    model = timm.create_model("test_vit", device="meta")
    assert prefix_tokens(path_of(model, "blocks.1.attn")) == (1, True)
    assert prefix_tokens(path_of(timm.create_model("test_resnet", device="meta"), "layer1.0")) == (None, False)
    owner = nn.Module()
    owner.class_token, owner.dist_token = torch.zeros(8), torch.zeros(1, 1, 8)
    assert prefix_tokens([nn.Identity(), owner]) == (2, True)
    owner.num_prefix_tokens = 5
    assert prefix_tokens([owner, model]) == (5, True)
