"""What OpenVINO does not know is said otherwise."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from broadsight.export import capture
from broadsight.export.openvino_format import plain_sizes


class Between(nn.Module):
    """(B, 3, H, W) -> (B, n), n being a tenth of the width, at least 7 and no more than an eighth of the height."""

    def forward(self, x: Tensor) -> Tensor:
        n = torch.sym_max(7, torch.sym_min(x.shape[3] // 10, x.shape[2] // 8))
        return x[:, 0, 0].topk(n, dim=1).values


def test_plain_sizes__the_same_numbers_without_maxima():
    openvino = pytest.importorskip("openvino")
    program = capture(Between().eval(), (3, 160, 224), any_size=True)
    plain = plain_sizes(program)
    there = [{node.target for node in one.graph.nodes} & {torch.sym_max, torch.sym_min} for one in (program, plain)]
    assert there == [{torch.sym_max, torch.sym_min}, set()]
    assert plain_sizes(plain) is plain
    run = openvino.Core().compile_model(openvino.convert_model(plain), "CPU")
    for height, width, count in ((64, 64, 7), (72, 80, 8), (80, 300, 10), (1000, 90, 9), (320, 320, 32)):
        images = np.random.default_rng(0).normal(size=(2, 3, height, width)).astype(np.float32)
        found = run(images)[0]
        assert found.shape == (2, count)
        np.testing.assert_allclose(found, Between()(torch.from_numpy(images)), atol=1e-6)
