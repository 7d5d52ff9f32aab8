"""The papers' dense tables: how each row is built, and counted without what depends on an image's content."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..dense import HEADS
from ..dense.counting import CLASSES, Counted
from ..dense.stages import Stages, open_stages
from .macs import LAYERS, OLD_PROFILER, PRODUCTS, Convention
from .tables import Row, more_rows

PAPERS = ("emsnet", "mat", "partialformer", "map")
# MAP's tables count batch norms beside the layers: without them four of the eight plain models fall short.
NORMED_LAYERS = Convention("layers, batch norms", layers_only=True, batch_norm=2)
CONVENTIONS = {"emsnet": OLD_PROFILER, "mat": LAYERS, "partialformer": PRODUCTS}
# MAP's rows are built twice. First with the tokens of the registered model's pool, as section 4.3 has it; ResNet50 is
# the ResNet-D that Table S6 calls MAP-R50, under the pool of Table S1, since only so its operations are the printed.
POOLED: dict[str, tuple[str, dict[str, Any]]] = {"map_resnet50": ("map_resnet50d", dict(groups=2, attn_dim=192))}
# Then ", fitted": with a neck of learned tokens, of widths that fit the parameters; in two channel groups as the pools.
FITTED = ", fitted"


def rows(tables: dict[str, Any]) -> Iterator[Row]:
    """Every row of the dense tables of all papers, and the plain models of MAP's."""
    more = more_rows("dense")
    listed = [(p, e["task"], e["backbone"], e["params"], e["macs"]) for p in PAPERS for e in tables[p]["dense"]]
    listed += [("map", *row) for row in more["baselines"]]
    for paper, task, backbone, params, macs in listed:
        for name in (backbone, backbone + FITTED) if backbone.startswith("map_") else (backbone,):
            build: Callable[[], nn.Module] | str = partial(DenseModel, task, name)
            if task == "upernet" and find_spec("segmentation_models_pytorch") is None:
                build = "segmentation-models-pytorch is not installed; pip install broadsight[seg]"
            figures = {"params": params, f"macs at {more['sizes'][task]}": macs}
            yield f"{more['tables'][paper][task]}: {task} on {name}", figures, build


def convention(name: str) -> Convention:
    """How the paper of a row such as "retinanet on mat_2" counts."""
    return CONVENTIONS.get(name.rpartition(" ")[2].partition("_")[0], NORMED_LAYERS)


class DenseModel(Counted):
    """The model of a row, without memory."""

    def __init__(self, task: str, backbone: str):
        stages = _stages(backbone)
        with torch.device("meta"):
            super().__init__(HEADS[task].build(stages, CLASSES[HEADS[task].task]))


@lru_cache(maxsize=32)  # the same for all tasks, and slow to open
def _stages(backbone: str) -> Stages:
    own: dict[str, Any] = {"neck": "map"} if backbone.startswith("map_") else {}
    name, arguments = POOLED.get(backbone, (backbone, {}))
    if backbone.endswith(FITTED):
        name = backbone.removeprefix("map_").removesuffix(FITTED)
        width = int(more_rows("dense")["fitted_widths"][name])
        own = dict(neck="tokens", neck_args=dict(dim=width, mlp_groups=2))
    with torch.device("meta"):
        return open_stages(name, **own, **arguments)
