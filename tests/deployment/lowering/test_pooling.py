import numpy as np
import pytest
import torch

from broadsight.deployment import prepare
from broadsight.layers import FlattenPool, MergeMaps


def in_onnx(module, *examples):
    """What ONNX Runtime makes of a module whose maps may have any size."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    free = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    options = dict(dynamo=True, dynamic_shapes=[(free,) * len(examples)], verbose=False)
    program = torch.onnx.export(prepare(module), examples, **options)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    names = [one.name for one in session.get_inputs()]
    return lambda *maps: session.run(None, dict(zip(names, (x.numpy() for x in maps), strict=True)))[0]


class Listed(torch.nn.Module):
    """A module of a list of maps, called with the maps."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *maps):
        return self.module(list(maps))


@pytest.mark.parametrize("resize", ["release", "ga"])
def test_merge_maps__in_programs_for_any_size(resize):
    """Sizes that are no multiples of each other, unlike those of the example."""
    merge = Listed(MergeMaps((4, 6, 8), 16, level=1, resize=resize).eval())
    model = in_onnx(merge, *(torch.randn(1, c, s, s) for c, s in ((4, 16), (6, 8), (8, 4))))
    for sizes in (((16, 16), (8, 8), (4, 4)), ((17, 23), (9, 12), (5, 6)), ((13, 24), (7, 12), (4, 6))):
        maps = [torch.randn(1, c, *size) for c, size in zip((4, 6, 8), sizes, strict=True)]
        with torch.inference_mode():
            np.testing.assert_allclose(model(*maps), merge(*maps), rtol=1e-4, atol=1e-5)


def test_flatten_pool__in_programs_for_any_size():
    pool = Listed(FlattenPool((8,), 5, grid=(7, 7)).eval())
    model = in_onnx(pool, torch.randn(1, 8, 14, 14))
    for size in ((14, 14), (9, 17), (5, 3)):
        x = torch.randn(1, 8, *size)
        with torch.inference_mode():
            np.testing.assert_allclose(model(x), pool(x), rtol=1e-4, atol=1e-5)
