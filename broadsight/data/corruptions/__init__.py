"""The fifteen common corruptions of ImageNet-C, seeded, for images of any size."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ...errors import check_choice
from ..seeds import mixed
from . import effects

SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels of a side

TABLE: dict[str, list[list[Any]]] = yaml.safe_load(Path(__file__).with_name("severities.yaml").read_text("utf-8"))
CORRUPTIONS = tuple(TABLE)
GROUPS = {"noise": CORRUPTIONS[:3], "blur": CORRUPTIONS[3:7], "weather": CORRUPTIONS[7:11], "digital": CORRUPTIONS[11:]}


def corrupt(image: np.ndarray, name: str, severity: int = 3, *, seed: int = 0) -> np.ndarray:
    """Corrupt an image (H, W, C) of uint8; C is 3 (RGB) or 1 (grey), H and W from 8.

    The corruptions are those of Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions
    and Perturbations" (ICLR 2019), written after their description, with their settings but for the departures that
    `severities.yaml` lists: results compare with each other, not with those published for the downloaded ImageNet-C.

    Args:
        name, severity: One of CORRUPTIONS, and 1 to 5.
        seed: Give every image one of its own, as `broadsight.data.seeds.mixed(seed, index)`. The severities of one seed
            share what is drawn: the direction of motion, the clouds, the needles of ice.
    """
    check_choice("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise ValueError(f"severity={severity!r} is not in 1..5; choose 1 (mild) to 5 (severe)")
    expected = f"uint8 (H, W, 3) or (H, W, 1), H and W from {SMALLEST}"
    if not isinstance(image, np.ndarray):
        raise ValueError(f"image is a {type(image).__name__}, not an array of {expected}; for PIL: np.asarray(image)")
    advice = [
        (image.dtype != np.uint8, "values from 0 to 1 become bytes by (image * 255).round().astype(np.uint8)"),
        (image.ndim == 2, "pass image[..., None]"),
        (image.ndim != 3 or image.shape[-1] not in (1, 3), "one image at a time, channels last, without transparency"),
        (min(image.shape[:2], default=0) < SMALLEST, "enlarge it first"),
    ]
    if wrong := [do for is_wrong, do in advice if is_wrong]:
        raise ValueError(f"image is {image.dtype} {image.shape}, not {expected}; {wrong[0]}")
    rng = np.random.default_rng(mixed(int(seed), CORRUPTIONS.index(name)))
    return effects.as_bytes(getattr(effects, name)(image / 255, rng, *TABLE[name][int(severity) - 1]))
