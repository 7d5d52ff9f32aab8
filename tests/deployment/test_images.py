"""Images reach an exported classifier exactly as they reach the model; answers are those of torch's softmax."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.data.decoding import decode
from broadsight.data.loading import Transforms
from broadsight.data.normalising import Normalise
from broadsight.deployment import Description
from broadsight.deployment.images import image_to_images, top_classes
from broadsight.runs.classifier import Classifier
from tests.deployment import tiny
from tests.refusals import refused


def described(transforms: Transforms, classes: tuple[str, ...] | None = None, task: str = "classify") -> Description:
    """As it comes out of an artefact: through JSON."""
    values = dict(title="net", classes=classes, task=task, channels=transforms.channels)
    said = tiny.described(transforms.size, preprocessing=tiny.preprocessing(transforms), **values)
    return Description.from_json(said.to_json())


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode)


@pytest.mark.filterwarnings("ignore:.*mode.*:DeprecationWarning")
@pytest.mark.parametrize(
    "transforms",
    [
        Transforms(32),
        Transforms(48, 3, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear", 0.95),
        Transforms(37, 3, interpolation="lanczos", crop_pct=1.0),
        Transforms(28, 1, (0.286,), (0.353,), "nearest", 0.9),
    ],
)
@pytest.mark.parametrize(("size", "mode"), [((61, 45), "RGB"), ((20, 90), "RGBA"), ((300, 200), "L")])
def test_image_to_images__bit_by_bit_as_the_classifier(transforms, size, mode):
    normalise = Normalise(transforms.mean, transforms.std)
    classifier, image = Classifier("", "", torch.nn.Identity(), transforms, None, normalise, {}), noise(*size, mode)
    pixels = torch.as_tensor(classifier.transforms.build(training=False)(decode(image, transforms.channels)))
    expected = classifier.normalise(pixels[None])[0].numpy()
    found = image_to_images(described(transforms))(image)
    assert found.dtype == np.float32 and found.shape == (transforms.channels, transforms.size, transforms.size)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", [(31, 17), (8000, 1), (1, 200_000), (3_000_000, 1)])
def test_image_to_images__by_hand_and_of_narrow_images(size):
    """An image of one colour stays so, whatever is cut off; whole, the last would take 200 GB on its way."""
    prepare = image_to_images(described(Transforms(224, 3, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))))
    expected = np.array([(1 - 0.5) / 0.5, (0.2 - 0.25) / 0.25, 0.4])[:, None, None]
    found = prepare(Image.new("RGB", size, (255, 51, 102)))
    np.testing.assert_allclose(found, np.broadcast_to(expected, (3, 224, 224)), atol=1e-6)


def test_image_to_images__upright_and_by_several_threads():
    """A note in the file says that the image lies on its side."""
    image, file = noise(24, 40), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(file, "PNG", exif=exif)
    prepare = image_to_images(described(Transforms(16)))
    turned = prepare(Image.open(io.BytesIO(file.getvalue())))
    assert np.array_equal(turned, prepare(image.transpose(Image.Transpose.ROTATE_270)))
    assert not np.array_equal(turned, prepare(image))
    images = [noise(50, 40, seed=seed) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(prepare, images))
    assert all(np.array_equal(image, prepare(photo)) for image, photo in zip(found, images, strict=True))


def test_image_to_images__what_does_not_suit():
    other = described(Transforms(24), task="detect")
    refused("^net was exported for the task detect; expected a classifier$", image_to_images, other)
    poor = replace(described(Transforms(24)), preprocessing={"crop": 24, "mean": [0.5] * 3})
    refused("^net does not say the 'std' of its preprocessing; export it again$", image_to_images, poor)


def test_top_classes__as_softmax_with_names_or_numbers_and_of_equals_the_first():
    logits = torch.randn(7)
    found = top_classes(described(Transforms(8), tuple("abcdefg")), logits.numpy(), 3)
    expected = logits.softmax(0).topk(3)
    assert [one["index"] for one in found] == expected.indices.tolist()
    assert [one["class"] for one in found] == ["abcdefg"[place] for place in expected.indices]
    assert [one["probability"] for one in found] == pytest.approx(expected.values.tolist(), abs=1e-6)
    assert json.loads(json.dumps(found)) == found
    found = top_classes(described(Transforms(8)), np.array([0, 1000, 1000], np.float32), 9)
    rows = [("1", 1, 0.5), ("2", 2, 0.5), ("0", 0, 0.0)]
    assert found == [dict(zip(("class", "index", "probability"), row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("logits", "top", "message"),
    [
        ([0, 1], 0, "top=0; expected 1 or more"),
        ([0, 1, 2], 1, r"logits of shape \(3,\); expected \(2,\)"),
        ([[0, 1]], 1, r"logits of shape \(1, 2\); expected \(2,\)"),
        ([0, float("nan")], 1, "net answers with logits that are not finite"),
        ([0, float("inf")], 1, "net answers with logits that are not finite"),
    ],
)
def test_top_classes__what_does_not_suit(logits, top, message):
    refused(message, top_classes, described(Transforms(8), ("a", "b")), np.array(logits, np.float32), top)
