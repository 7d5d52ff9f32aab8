"""The page prepares images as Python does, bit by bit: PIL's resampling, torchvision's sizes, our normalising."""

import json
import math
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.data.loading import Transforms
from broadsight.data.normalising import Normalise, per_channel
from broadsight.deployment.formats.web import INTERPOLATIONS
from broadsight.deployment.formats.web.node import node
from tests.deployment.formats.web.pages import MEAN, STD

pytestmark = pytest.mark.skipif(node() is None, reason="there is no node")

SIZES = (
    *((1, 1), (64, 64), (73, 73), (73, 90), (640, 480), (481, 641), (37, 900), (900, 37), (3, 500), (17, 13)),
    *((255, 257), (64, 97), (98, 64), (1200, 1500), (5, 4), (1, 300)),
)


def put(folder: Path, pixels: np.ndarray, channels: int, **said) -> dict:
    """An image (H, W, 3) as the page's script takes it, and how it is to be prepared."""
    height, width, _ = pixels.shape
    file = folder / f"{len(list(folder.iterdir()))}"
    np.dstack([pixels, np.full((height, width), 255, np.uint8)]).tofile(file)
    return dict(file=str(file), width=width, height=height, channels=channels, preprocessing=said)


def run(folder: Path, cases: list[dict]) -> list[np.ndarray]:
    """What the page makes of all cases, from one process of node."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script, page = Path(__file__).with_name("prepare.cjs"), files("broadsight.deployment.formats.web")
    command = [node(), script, page, folder / "cases.json"]
    subprocess.run([str(part) for part in command], check=True, timeout=300)
    return [np.fromfile(case["file"] + ".out", np.float32) for case in cases]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Both answers to many cases: (what, the page's, Python's)."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    cases, expected = [], []
    for place, (width, height) in enumerate(SIZES):
        for interpolation in INTERPOLATIONS:
            if width * height > 5e5 and interpolation not in ("bilinear", "bicubic"):
                continue
            # steep edges overshoot, noise makes every weight count
            low = 2 if place % 2 else 256
            pixels = (random.integers(0, low, (height, width, 3)) * (255 // (low - 1))).astype(np.uint8)
            channels = (3, 3, 1)[len(cases) % 3]
            crop, crop_pct = ((64, 0.875), (33, 1.0), (48, 0.95), (64, 1.3))[len(cases) % 4]
            mean, std = per_channel(MEAN, channels), per_channel(STD, channels)
            image = Image.fromarray(pixels)
            image = image.convert("L") if channels == 1 else image
            seen = Transforms(crop, channels, mean, std, interpolation, crop_pct).build(training=False)(image)
            expected.append(Normalise(mean, std)(seen[None])[0].numpy())
            said = dict(resize=math.floor(crop / crop_pct), crop=crop, interpolation=interpolation, mean=mean, std=std)
            cases.append(put(folder, pixels, channels, **said))
    return list(zip(cases, run(folder, cases), expected, strict=True))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_prepare__bit_by_bit_as_python(prepared, interpolation):
    tried = [one for one in prepared if one[0]["preprocessing"]["interpolation"] == interpolation]
    assert len(tried) >= 10
    for case, found, expected in tried:
        assert np.array_equal(found.reshape(expected.shape), expected), case


def test_prepare__narrow_images_take_no_memory(tmp_path):
    """Resized as a whole, these would have ten billion pixels; Python crops them first and may round otherwise."""
    size, cases, expected = 200_000, [], []
    said = dict(resize=256, crop=224, interpolation="bicubic", mean=(0.0,) * 3, std=(1 / 255,) * 3)
    pixels = np.random.default_rng(0).integers(0, 256, (size, 3), dtype=np.uint8)
    for image in (pixels[None], pixels[:, None]):
        expected.append(Transforms(224).build(training=False)(Image.fromarray(image)).numpy())
        cases.append(put(tmp_path, image, 3, **said))
    for found, seen in zip(run(tmp_path, cases), expected, strict=True):
        assert abs(found.reshape(seen.shape) - seen).max() <= 1 and seen.std() > 9


def test_prepare__cases_are_not_all_alike(prepared):
    """What would make the comparison empty: images of one colour, one channel, no border."""
    assert {case["channels"] for case, _, _ in prepared} == {1, 3}
    assert any(case["preprocessing"]["resize"] < case["preprocessing"]["crop"] for case, _, _ in prepared)
    assert sum(expected.std() > 0.5 for _, _, expected in prepared) > len(prepared) / 2
