"""The fifteen corruptions: known values where there are any, bytes that depend on the arguments only, and severity."""

import io
from itertools import product

import numpy as np
import pytest
from PIL import Image

from broadsight.data.corruptions import CORRUPTIONS, GROUPS, SEVERITIES, TABLE, corrupt, effects
from broadsight.data.corruptions.effects import convolved, gaussian_kernel, moved, point_kernel, trail_kernel
from broadsight.data.scenes import draw_scene
from broadsight.data.seeds import mixed
from tests.refusals import refused

RANDOM = set(CORRUPTIONS) - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}


def flat(value: int | tuple[int, ...], side: int = 64, channels: int = 3) -> np.ndarray:
    return np.full((side, side, channels), value, np.uint8)


def natural(index: int, side: int) -> np.ndarray:
    return draw_scene(index, size=side).image


def ramp(side: int) -> np.ndarray:
    """Light from left to right and from top to bottom, with a grain."""
    line = np.linspace(20, 235, side)
    light = np.stack(np.broadcast_arrays(line, line[:, None], 128.0), -1)
    return np.clip(light + np.random.default_rng(0).normal(0, 20, light.shape), 0, 255).astype(np.uint8)


def ways(effect, side: int, *settings: float) -> np.ndarray:
    """(side, side, 2): how far down and right of itself every pixel looks."""
    places = np.moveaxis(np.indices((side, side)), 0, -1).astype(float)
    return effect(places, generator(), *settings) - places


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def change(image: np.ndarray, name: str, severity: int, seed: int = 0) -> float:
    return np.abs(corrupt(image, name, severity, seed=seed).astype(int) - image).mean()


def test_names__in_groups_of_which_blurs_and_moves_leave_a_plain_image_alone():
    assert sum(GROUPS.values(), ()) == CORRUPTIONS and SEVERITIES == (1, 2, 3, 4, 5)
    assert {group: len(names) for group, names in GROUPS.items()} == dict(noise=3, blur=4, weather=4, digital=4)
    assert {len(settings) for settings in TABLE.values()} == {5}
    names = (*GROUPS["blur"], "elastic_transform", "contrast", "pixelate")
    for value, name, severity in product((0, 77, 255), names, SEVERITIES):
        np.testing.assert_array_equal(corrupt(flat(value, 40), name, severity), flat(value, 40), name)


@pytest.mark.parametrize("shape", [(33, 47, 3), (40, 32, 1), (8, 8, 3), (8, 100, 1)])
def test_corrupt__keeps_shape_and_the_input(shape):
    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    image.flags.writeable = False
    for name, severity in product(CORRUPTIONS, (1, 5)):
        result = corrupt(image, name, severity)
        assert result.shape == shape and result.dtype == np.uint8, name
        assert not np.shares_memory(result, image) and (result != image).any(), name


def test_corrupt__depends_on_its_arguments_only():
    image = natural(0, 32)
    for name in CORRUPTIONS:
        np.random.seed(1)
        first = corrupt(image, name, 4, seed=mixed(7, 123))
        np.random.seed(2)
        state = np.random.get_state()[1].copy()
        other = corrupt(image, name, 4, seed=mixed(7, 124))
        np.testing.assert_array_equal(corrupt(image, name, 4, seed=np.int64(mixed(7, 123))), first)
        np.testing.assert_array_equal(np.random.get_state()[1], state)
        assert (other != first).any() == (name in RANDOM), name
        turned = image[::-1, ::-1]  # any memory layout
        np.testing.assert_array_equal(corrupt(turned, name), corrupt(turned.copy(), name))


@pytest.mark.parametrize(("side", "scenes"), [(32, 3), (96, 2), (224, 0)])
def test_corrupt__every_severity_changes_more(side, scenes):
    images = [natural(i, side) for i in range(scenes)] + [natural(9, side) // 2 + ramp(side) // 2]
    for name in CORRUPTIONS:
        table = [[change(image, name, severity, i) for severity in SEVERITIES] for i, image in enumerate(images)]
        changes = np.mean(table, 0)
        assert changes[0] > 1 and (np.diff(changes) > 0).all(), (name, changes)


def test_corrupt__grey_suffers_as_colours_do_and_lengths_scale_with_the_image():
    image = natural(3, 64)
    grey = np.asarray(Image.fromarray(image).convert("L"))[..., None]
    three = np.repeat(grey, 3, 2)
    for name in CORRUPTIONS:
        ratio = change(grey, name, 3) / change(three, name, 3)
        assert 0.8 < ratio < 1.25, (name, ratio)
    # To corrupt and to shrink is to shrink and to corrupt.
    large = natural(1, 224)
    small = np.asarray(Image.fromarray(large).reduce(4))
    for name in ("defocus_blur", "motion_blur", "zoom_blur"):
        expected = np.asarray(Image.fromarray(corrupt(large, name, 5)).reduce(4)).astype(int)
        assert np.abs(corrupt(small, name, 5) - expected).mean() < 0.2 * np.abs(small - expected).mean(), name


def test_noise__moments_and_shares():
    for severity, deviation in ((1, 0.08), (2, 0.12)):  # at which hardly anything is clipped
        result = corrupt(flat(128, 128), "gaussian_noise", severity) / 255
        assert result.mean() == pytest.approx(128 / 255, abs=0.002)
        assert result.std() == pytest.approx(deviation, rel=0.02)
    for severity, photons in ((1, 60), (2, 25), (3, 12)):  # variance is light over photons
        result = corrupt(flat(51, 128), "shot_noise", severity) / 255
        assert result.mean() == pytest.approx(0.2, abs=0.003)
        assert result.var() == pytest.approx(0.2 / photons, rel=0.03)
    assert not corrupt(flat(0), "shot_noise", 5).any()  # where there is no light there is no noise
    for severity, share in enumerate((0.03, 0.06, 0.09, 0.17, 0.27), 1):
        result = corrupt(flat(128, 128), "impulse_noise", severity)
        assert set(np.unique(result)) == {0, 128, 255}
        assert [(result == value).mean() for value in (0, 255)] == pytest.approx([share / 2] * 2, rel=0.1)
        alone = (result != 128).sum(2)
        assert (alone == 1).sum() > (alone > 1).sum()  # each channel by itself


def test_convolved__is_the_sum_over_a_mirrored_image_and_kernels_are_as_told():
    x, kernel = generator().random((9, 12, 2)), generator().random((5, 5))
    padded = np.pad(x, ((2, 2), (2, 2), (0, 0)), "symmetric")
    # a kernel's entry right of the centre carries light to the right
    pairs = product(range(5), range(5))
    expected = sum(kernel[i, j] * padded[4 - i : 13 - i, 4 - j : 16 - j] for i, j in pairs)
    np.testing.assert_allclose(convolved(x, kernel), expected, atol=1e-12)
    kernels = [gaussian_kernel(sigma) for sigma in (0.2, 1, 5)]
    kernels += [trail_kernel(radius, 3, 30) for radius in (0.3, 2, 20)]
    assert [round(kernel.sum(), 9) for kernel in kernels] == [1] * 6
    assert gaussian_kernel(1)[4, 5] / gaussian_kernel(1)[4, 4] == pytest.approx(np.exp(-0.5))
    np.testing.assert_allclose(  # three of four quarters of a light at (0.25, 0.5), and one at the centre
        point_kernel(np.array([0.25, 0]), np.array([0.5, 0]), np.array([3.0, 1])),
        [[0, 0, 0], [0, 0.53125, 0.28125], [0, 0.09375, 0.09375]],
    )
    kernel = trail_kernel(10, 5, 0)  # points one way and fades
    half = len(kernel) // 2
    assert kernel[half, half:].sum() == pytest.approx(1)  # to the right and nowhere else
    assert (np.diff(kernel[half, half + 1 : half + 20]) < 0).all()
    assert kernel[half, half + 10] / kernel[half, half + 5] == pytest.approx(np.exp(-1.5), rel=0.02)
    np.testing.assert_allclose(trail_kernel(10, 5, 90), kernel.T, atol=1e-12)


def test_blurs__discs_of_lights_glass_within_its_reach_and_zoom_of_a_ramp():
    image = flat(0, 224, 1)
    image[110:113, 110:113] = 255
    lit = corrupt(image, "defocus_blur", 5)[..., 0].astype(float)
    assert lit.sum() == pytest.approx(9 * 255, rel=0.05)
    down, right = np.nonzero(lit)
    distance = np.hypot(down - 111, right - 111)
    assert 10 < distance.max() < 13 and len(distance) == pytest.approx(np.pi * 11.5**2, rel=0.1)
    inside = lit[np.hypot(*np.indices(lit.shape) - 111) < 8]
    assert inside.std() < 1 and inside.mean() == pytest.approx(9 * 255 / (100 * np.pi), abs=0.5)
    image = flat(0, 224, 1)
    image[100:124, 100:124] = 255
    for severity, (sigma, reach, rounds) in enumerate(TABLE["glass_blur"], 1):
        result = corrupt(image, "glass_blur", severity)[..., 0]
        margin = int(np.ceil(reach * rounds + 8 * sigma)) + 1
        inside = result[100 - margin : 124 + margin, 100 - margin : 124 + margin]
        assert inside.sum() == result.sum() and result.mean() == pytest.approx(image.mean(), rel=0.03)
    for (side, scale), (reach, rounds) in product(((224, 1), (96, 96 / 224), (56, 1 / 3)), ((4, 2), (2, 3))):
        inner = ways(effects.glass_blur, side, 0.01, reach, rounds)[8:-8, 8:-8]  # scaled to a third, no less
        assert inner.var() == pytest.approx(rounds * (reach * scale) ** 2 / 3, rel=0.1)
    image = np.repeat(np.arange(0, 224, dtype=np.uint8)[None, :, None], 224, 0)
    for severity, (count, step) in enumerate(TABLE["zoom_blur"], 1):
        slope = (1 + (1 / (1 + step * np.arange(count))).sum()) / (count + 1)
        expected = 111.5 + slope * (np.arange(224) - 111.5)
        assert np.abs(corrupt(image, "zoom_blur", severity)[..., 0] - expected).max() < 1


def test_moves_and_noise__between_pixels_by_slope_and_direction_by_distance_and_shear():
    x = np.arange(12.0).reshape(3, 4, 1)
    still, one = np.zeros((3, 4)), np.ones((3, 4))
    np.testing.assert_array_equal(moved(x, still, still), x)
    assert moved(x, one, still)[..., 0].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11], [4, 5, 6, 7]]
    assert moved(x, still, -one)[0, :, 0].tolist() == [1, 0, 1, 2]
    assert moved(x, still, one / 4)[0, :, 0].tolist() == [0.25, 1.25, 2.25, 2.75]
    assert moved(x, 100 * one, 100 * one).max() <= 11
    power = np.zeros((64, 33))
    for seed in range(40):
        noise = effects.filtered_noise(np.random.default_rng(seed), 64, 64, 1.5)
        assert noise.mean() == pytest.approx(0, abs=1e-9) and noise.std() == pytest.approx(1)
        power += np.abs(np.fft.rfft2(noise)) ** 2
    frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.rfftfreq(64)) * 64
    low, high = (power[np.abs(frequency - centre) < 0.5].mean() for centre in (6, 12))
    assert np.log2(low / high) == pytest.approx(3, abs=0.3)  # twice the slope, being power
    level = effects.filtered_noise(generator(), 64, 64, 1.5, 0, 10)
    assert np.abs(np.diff(level, axis=1)).mean() < 0.5 * np.abs(np.diff(level, axis=0)).mean()  # drawn out to the right
    inner = slice(40, 184)
    waves = ways(effects.elastic_transform, 224, 1.1, 0)[inner, inner]
    np.testing.assert_allclose(waves.std((0, 1)), 1.1, rtol=0.1)
    steps = np.diff(waves[..., 0], axis=0)
    assert steps.std() == pytest.approx(1.1 / (2**0.5 * 2.4), rel=0.1)  # smooth: the derivative of such a field
    shear = ways(effects.elastic_transform, 224, 0, 4.9)[inner, inner]
    assert np.abs(np.diff(shear, 2, axis=0)).max() < 1e-9 and np.abs(np.diff(shear, 2, axis=1)).max() < 1e-9
    third = 224 / 3 - 0.5
    for down, right in ((third, third), (third, -third), (-third, -third)):
        at = shear[72, 72] + down * (shear[1, 0] - shear[0, 0]) + right * (shear[0, 1] - shear[0, 0])
        assert (np.abs(at) < 4.9 + 0.2).all()
    small = ways(effects.elastic_transform, 56, 1.1, 0)[8:-8, 8:-8]
    np.testing.assert_allclose(small.std((0, 1)), 1.1 / 3, rtol=0.1)  # scaled to a third, no less


def test_weather__snow_frost_and_fog():
    for severity, keep in enumerate((0.8, 0.7, 0.7, 0.65, 0.55), 1):
        result = corrupt(flat(0, 96), "snow", severity).astype(int)
        assert result.min() == pytest.approx((1 - keep) * 0.5 * 255, abs=1)  # where no flake is
        assert result.max() > result.min() + 60
        assert np.abs(result - result[::-1, ::-1]).max() <= 1  # the second layer is the first upside down
    result = corrupt(flat(0, 96), "frost", 5) / 255
    assert result.max() < 0.75 and (np.diff(result.reshape(-1, 3)) >= 0).all()  # ice is a little blue
    result = corrupt(flat(255, 96), "frost", 5)
    assert result.min() == pytest.approx(0.6 * 255, abs=3) and result.max() == 255
    for height, width in ((32, 32), (96, 64), (224, 224)):
        layer = effects.frost_layer(generator(), height, width)
        assert layer.shape == (height, width) and layer.min() >= 0 and layer.max() <= 1
        assert 0.25 < layer.mean() < 0.55 and layer.std() > 0.15
    for severity, thickness in enumerate((1.5, 2, 2.5, 2.75, 3), 1):
        result = corrupt(flat(255, 96), "fog", severity) / 255
        assert result.min() >= 1 / (1 + thickness) - 0.002
        assert result.mean() == pytest.approx((1 + 0.5 * thickness) / (1 + thickness), abs=0.01)
        assert result.std() == pytest.approx(thickness / (1 + thickness) / 6, rel=0.05)
        assert (result == result[..., :1]).all()  # colourless


def test_digital__brightness_and_contrast_by_formula_others_as_pil_makes_them():
    for severity, amount in enumerate((0.1, 0.2, 0.3, 0.4, 0.5), 1):
        bright = min(1, 200 / 255 + amount) * 255
        expected = [round(bright), round(bright / 2), round(bright / 4)]  # hue and saturation stay
        assert np.abs(corrupt(flat((200, 100, 50), 8), "brightness", severity)[0, 0] - np.array(expected)).max() <= 1
        assert corrupt(flat(0, 8), "brightness", severity)[0, 0].tolist() == [np.rint(amount * 255)] * 3
        grey = corrupt(flat(40, 8, 1), "brightness", severity)
        assert grey[0, 0, 0] == pytest.approx(40 + amount * 255, abs=0.51)
    image = ramp(32)
    mean = image.mean((0, 1))
    for severity, share in enumerate((0.4, 0.3, 0.2, 0.1, 0.05), 1):
        expected = mean + share * (image - mean)
        assert np.abs(corrupt(image, "contrast", severity) - expected).max() <= 0.5 + 1e-9
    image = natural(2, 50)
    for severity, few in enumerate((30, 25, 20, 15, 12), 1):
        box = Image.Resampling.BOX
        expected = Image.fromarray(image).resize((few, few), box).resize((50, 50), box)
        np.testing.assert_array_equal(corrupt(image, "pixelate", severity), np.asarray(expected))
    for image, form in ((natural(2, 48), (48, 48, 3)), (natural(2, 48)[..., :1], (48, 48))):
        for severity, quality in enumerate((25, 18, 15, 10, 7), 1):
            file = io.BytesIO()
            Image.fromarray(image.reshape(form)).save(file, "JPEG", quality=quality)
            expected = np.asarray(Image.open(file)).reshape(image.shape)
            np.testing.assert_array_equal(corrupt(image, "jpeg_compression", severity), expected)


@pytest.mark.parametrize(
    ("image", "name", "severity", "message"),
    [
        (flat(0), "gausian_noise", 1, "unknown corruption 'gausian_noise'; did you mean 'gaussian_noise'?"),
        (flat(0), "fog", 0, "severity=0 is not in 1..5; choose 1 (mild) to 5 (severe)"),
        (flat(0), "fog", 6, "severity=6 is not in 1..5; choose 1 (mild) to 5 (severe)"),
        (flat(0) / 255, "fog", 1, "image is float64 (64, 64, 3), not uint8 (H, W, 3) or (H, W, 1), H and W from 8; "),
        (flat(0)[..., 0], "fog", 1, "H and W from 8; pass image[..., None]"),
        (flat(0)[None], "fog", 1, "image is uint8 (1, 64, 64, 3), not "),
        (flat(0, 64, 4), "fog", 1, "; one image at a time, channels last, without transparency"),
        (flat(0)[:7], "fog", 1, "image is uint8 (7, 64, 3), not uint8 (H, W, 3) or (H, W, 1), H and W from 8; enlarge"),
        (Image.new("RGB", (9, 9)), "fog", 1, "image is a Image, not an array of uint8 (H, W, 3) or "),
    ],
)
def test_corrupt__wrong_arguments(image, name, severity, message):
    assert message in refused("", corrupt, image, name, severity)
