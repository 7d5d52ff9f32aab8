"""What lowered layers are built from computes what torch does."""

import pytest
import torch
import torch.nn.functional as F

from broadsight.deployment.lowering.operations import attention, average_by_products, split_heads


@pytest.mark.parametrize(
    "sizes", [((5, 7), (9, 13)), ((17, 6), (9, 5)), ((8, 8), (4, 2)), ((3, 3), (3, 3)), ((4, 9), (11, 4))]
)
def test_average_by_products__is_adaptive_average_pooling(sizes):
    (H, W), (h, w) = sizes
    x = torch.randn(2, 3, H, W)
    torch.testing.assert_close(average_by_products(x, h, w), F.adaptive_avg_pool2d(x, (h, w)))


@pytest.mark.parametrize("hidden", [False, True])
def test_attention__is_scaled_dot_product_attention(hidden):
    torch.manual_seed(0)
    q, k, v = split_heads(torch.randn(2, 7, 3 * 12, dtype=torch.float64), 3, 4)
    mask = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    mask[1, ..., 4:] = float("-inf")
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if hidden else None)
    torch.testing.assert_close(attention(q, k, v, mask if hidden else None), expected)
    q, k = split_heads(torch.arange(12.0).view(1, 1, 12), 2, 3)  # by kind, then head
    assert q.flatten().tolist() == [0, 1, 2, 3, 4, 5] and k.shape == (1, 3, 1, 2)
    assert k[0, 2, 0].tolist() == [10, 11]
