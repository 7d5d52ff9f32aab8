import pytest
import torch
import torch.nn.functional as F

from broadsight.deployment import prepare
from broadsight.layers import CMHSA
from tests.compare import randomize


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4), (7, 7)])
def test_cmhsa__sums_the_same_windows(size, spare):
    attn = randomize(CMHSA(64)).eval()
    x = torch.randn(2, *size, 64)
    found = prepare(attn)(F.pad(x, [0, 0, 0, spare, 0, spare]), spare)
    torch.testing.assert_close(found[:, : size[0], : size[1]], attn(x))
