"""A dense model as a run folder keeps it: the model with its best weights, and what its labels mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.dense.resolve import DenseSplits
from ..dense.build import make_dense_model, neck_of
from ..dense.heads import HEADS
from ..dense.scoring import Views
from ..errors import first_line
from ..inspection.precision import DTYPES, chosen
from ..models.from_run import check_arguments, described_as, label_names, refuse_large
from ..training.dense import LARGEST, data_of, views_of
from ..training.history import check_own_data
from ..training.recipes import Recipe
from ..training.run_folder import CONFIG, WEIGHTS, RunFolder
from ..training.settings import title
from ..weights.loading import load_given
from .classifier import Verbs, chosen_device


@dataclass(frozen=True)
class DenseModel(Verbs):
    """A trained dense model."""

    path: Path  # its folder
    title: str  # the model in a few words
    task: str
    head: str
    model: Any  # in eval mode, on its device
    settings: Mapping[str, Any]  # of its training
    recipe: Recipe
    classes: tuple[str, ...]  # of objects the first has label 1, of pixels 0
    category_ids: dict[int, int]  # from a label to a category's id in the COCO file it learned from; none for pixels
    keypoint_names: tuple[str, ...]  # this and the next three as DenseSplits has them
    flip_pairs: tuple[tuple[int, int], ...]
    skeleton: tuple[tuple[int, int], ...]
    keypoint_offset: float
    parameters: int
    device: torch.device
    precision: str = "fp32"  # of convolutions and products, see `autocast`

    @property
    def source(self) -> str:
        return str(self.path)

    @property
    def top_down(self) -> bool:
        """Whether it looks at crops of single objects."""
        return HEADS[self.head].top_down

    @property
    def keypoint_threshold(self) -> float:
        """The lowest score of a keypoint that is worth drawing: of heat maps, and of torchvision's logits."""
        return 0.3 if self.top_down else 2.0

    @property
    def channels(self) -> int:
        return self.model.stages.in_chans

    def autocast(self) -> Any:
        """A `with` in which it computes in its precision: by autocast, since boxes and anchors need float32."""
        return torch.autocast(self.device.type, DTYPES[self.precision], enabled=self.precision != "fp32")

    def views(self, *, flip: bool = False, scales: tuple[float, ...] = (1.0,), slide: bool = False) -> Views:
        """What it is shown of an image."""
        usual = views_of(self.task, self.recipe)
        return Views(flip, scales, usual.short_side, usual.long_side, slide)

    def own_data(self) -> DenseSplits:
        """The images that it was trained and validated on."""
        check_own_data(self.settings)
        return data_of(self.settings, self.recipe, self.channels)


def open_dense(
    path: str | Path, *, device: str = "auto", size: int | None = None, precision: str = "fp32"
) -> DenseModel:
    """The best model of a dense run; `size` is the shorter side to look at images in, if not that of its training."""
    path = Path(path)
    config = RunFolder(path).dense_config()
    RunFolder(path).check_weights(config)
    where, about = str(path / CONFIG), config["broadsight"]
    settings, labels = about["settings"], about["labels"]
    try:
        recipe = Recipe().change(about["recipe"])
        arguments: dict[str, Any] = {**config["model_args"], "num_classes": config["num_classes"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} describes no dense run ({first_line(error)} is not there)") from None
    check_arguments("dense_model", arguments, where)
    arguments["neck"] = neck_of(arguments)
    described, classes = described_as(config, where), label_names(config, where)
    if size is not None:
        recipe, arguments = _resized(recipe, arguments, size)
    try:
        if (path / WEIGHTS).is_file():  # the model is as large as these, or refused
            refuse_large(lambda: make_dense_model(**arguments), (path / WEIGHTS).stat().st_size // 2, where)
        model: Any = make_dense_model(**arguments)
    except ValueError:
        raise
    except Exception as error:
        raise RuntimeError(f"the model of {path} cannot be made: {first_line(error)}") from None
    model.pretrained_cfg, place = described, chosen_device(device)
    load_given(model, path)
    pairs = {key: tuple((int(a), int(b)) for a, b in labels[key]) for key in ("flip_pairs", "skeleton")}
    return DenseModel(
        *(path, title(settings), about["task"], settings["head"], model.to(place).eval(), settings, recipe),
        classes=classes or (),
        category_ids={int(label): number for label, number in labels["category_ids"].items()},
        keypoint_names=tuple(labels["keypoint_names"]),
        keypoint_offset=labels["keypoint_offset"],
        parameters=about["parameters"],
        device=place,
        precision=chosen(precision, place),
        **pairs,
    )


def pixels_of(image: Image.Image) -> Tensor:
    """Bytes (C, H, W) of an image in mode RGB or L."""
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1)


def _resized(recipe: Recipe, arguments: dict[str, Any], size: int) -> tuple[Recipe, dict[str, Any]]:
    if size < 32:
        raise ValueError(f"--size {size}; expected 32 pixels or more")
    factor = size / (recipe.eval_size or recipe.image_size or LARGEST)
    long = None if recipe.long_side is None else round(recipe.long_side * factor)
    options = dict(arguments.get("head_args") or {})
    if "input_size" in options:
        raise ValueError(f"--size {size}; a pose model looks at crops of {options['input_size']} pixels alone")
    if "image_size" in options:
        options["image_size"] = [round(side * factor) for side in options["image_size"]]
    return recipe.change({"eval_size": size, "long_side": long}), {**arguments, "head_args": options}
