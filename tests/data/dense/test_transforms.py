"""Whatever is done to an image, its boxes bound what they bounded, masks cover it, keypoints lie on their dots."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from broadsight.data.dense import transforms as dense_transforms
from broadsight.data.dense.transforms import GROUND, DenseTransforms, crop, crop_planes, flip, left_over, resize
from broadsight.data.seeds import seed_transforms
from tests.refusals import refused

PAIRS = ((0, 1),)
CHAINS = {
    "flip": dict(hflip=1.0),
    "up": dict(image_size=80, hflip=0.0),
    "down": dict(image_size=40, hflip=0.0),
    "scales": dict(image_size=50, resize=(0.5, 2.0), hflip=0.0),
    "fixed": dict(image_size=56, fixed=True, hflip=0.0),
    "random": dict(crop="random", hflip=0.0),
    "detr": dict(image_size=60, resize=(0.6, 1.0), crop="detr", hflip=0.0),
    "iou": dict(image_size=72, crop="iou", fixed=True, hflip=0.0),
    "all": dict(image_size=64, resize=(0.7, 1.5), crop="random"),
    "ssd": dict(image_size=72, crop="iou", fixed=True, hflip=0.5),
}


def drawn(seed: int) -> tuple[Image.Image, dict]:
    """A red object with a yellow dot on its left and a magenta on its right, a cyan object, and a white crowd."""
    random = np.random.default_rng(seed)
    height, width = (48, 64) if seed % 2 else (64, 48)
    pixels = np.zeros((height, width, 3), np.uint8)
    masks = np.zeros((3, height, width), np.uint8)
    boxes = []
    for row, (top, low) in enumerate(((2, height // 2 - 1), (height // 2 + 1, height - 8))):
        h, w = int(random.integers(low - top - 6, low - top + 1)), int(random.integers(20, 36))
        y, x = int(random.integers(top, low - h + 1)), int(random.integers(0, width - w + 1))
        masks[row, y : y + h, x : x + w] = 1
        boxes.append([x, y, x + w, y + h])
    boxes.append([0, height - 4, width, height])
    masks[2, -4:] = 1
    pixels[masks[0] > 0], pixels[masks[1] > 0], pixels[masks[2] > 0] = (255, 0, 0), (0, 255, 255), (255, 255, 255)
    x1, y1, x2, y2 = boxes[0]
    points = np.zeros((3, 3, 3), np.float32)
    for number, (x, colour) in enumerate(((x1 + 4.5, 1), (x2 - 4.5, 2))):
        y = (y1 + y2) / 2
        pixels[int(y - 3.5) : int(y + 3.5), int(x - 3.5) : int(x + 3.5), colour] = 255
        points[0, number] = int(x - 3.5) + 3.5, int(y - 3.5) + 3.5, 2
    corners = tv_tensors.BoundingBoxes(torch.tensor(boxes).float(), format="XYXY", canvas_size=(height, width))
    target = dict(boxes=corners, labels=torch.tensor([1, 2, 1]), iscrowd=torch.tensor([0, 0, 1]), image_id=seed)
    target |= dict(masks=tv_tensors.Mask(torch.from_numpy(masks)), keypoints=torch.from_numpy(points))
    return Image.fromarray(pixels), target | dict(area=torch.tensor(masks.sum((1, 2))).float())


def coloured(pixels: torch.Tensor, label: int) -> torch.Tensor:
    """Where an object is seen; white is the crowd."""
    red, green, blue = pixels.int()
    return (red > 127) & (torch.minimum(green, blue) < red / 2) if label == 1 else (red < 62) & (green > 127)


@pytest.mark.parametrize("name", CHAINS)
def test_objects__stay_where_they_are_seen(name):
    build = DenseTransforms(**{"task": "keypoints", "image_size": 48, **CHAINS[name]}).build(True, PAIRS)
    dots, objects, mirrored = 0, 0, set()
    for seed in range(60):
        image, given = drawn(seed)
        seed_transforms(1, seed)
        pixels, target = build(image, given)
        height, width = pixels.shape[1:]
        assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
        assert all(type(value) in (torch.Tensor, int) for value in target.values())
        assert target["image_id"] == seed and not target["iscrowd"].any()  # the crowd is gone
        assert len({len(value) for value in target.values() if isinstance(value, torch.Tensor)}) == 1
        assert target["masks"].shape[1:] == (height, width)
        for row, label in enumerate(target["labels"].tolist()):
            x1, y1, x2, y2 = target["boxes"][row].tolist()
            assert 0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height
            seen = coloured(pixels, label)
            if min(x2 - x1, y2 - y1) < 3:
                continue
            objects += 1
            places = seen.nonzero()
            top, left, bottom, right = *places.amin(0).tolist(), *(places.amax(0) + 1).tolist()
            assert max(abs(a - b) for a, b in zip((x1, y1, x2, y2), (left, top, right, bottom), strict=True)) <= 1.5
            mask = target["masks"][row].bool()
            assert (mask ^ seen).sum() <= 2 * (right - left + bottom - top)  # no more than its outline
            assert abs(float(target["area"][row]) - int(mask.sum())) <= 2 * (right - left + bottom - top)
        for number, (x, y, visible) in enumerate(target["keypoints"][target["labels"] == 1].flatten(0, 1).tolist()):
            if visible and x < width and y < height:
                dots += 1
                own, other = (bool(pixels[channel, int(y), int(x)] > 90) for channel in (1 + number, 2 - number))
                assert number < 2 and own != other, (seed, number)
                mirrored.add((seed, other))
            assert visible or (x, y) == (0, 0)
    assert objects > 60 and dots > 60
    assert len({seed for seed, _ in mirrored}) == len(mirrored)  # both dots of an image say the same
    often = CHAINS[name].get("hflip", 0.5)
    assert {other for _, other in mirrored} == ({False} if often == 0 else {True} if often == 1 else {False, True})


def test_random_crop__keeps_an_object_and_shows_less():
    build = DenseTransforms("instances", 48, crop="random", hflip=0.0).build(True)
    shares = set()
    for seed in range(40):
        seed_transforms(seed)
        pixels, left = build(*drawn(seed))
        shares.add(len(left["labels"]))
        assert min(pixels.shape[1:]) == 48 or max(pixels.shape[1:]) == 80
    assert {1, 2} == shares


def test_detr_window__crops_half_of_the_images_to_what_is_printed():
    """Of COCO's 480 x 640: as if the shorter side were 400, 500 or 600, and 384 to 600 of each side were kept."""
    torch.manual_seed(0)
    windows = [dense_transforms.detr_window(480, 640, 800) for _ in range(2000)]
    cropped = [window for window in windows if window != (0, 0, 480, 640)]
    assert 0.46 < len(cropped) / len(windows) < 0.54
    assert all(0 <= top <= 480 - h and 0 <= left <= 640 - w for top, left, h, w in cropped)
    heights, widths = ([window[place] for window in cropped] for place in (2, 3))
    # The sides are 400 x 533, 500 x 667 or 600 x 800 there: 384 of 600 and of 800 are the least
    assert [min(heights), max(heights), min(widths), max(widths)] == pytest.approx([307, 480, 307, 640], abs=3)
    # Less than 384 of 500 was cropped at 600, to 600 of 800 pixels at most
    assert max(width for *_, height, width in cropped if height < 365) == pytest.approx(480, abs=5)
    small = [dense_transforms.detr_window(4, 3, 800) for _ in range(99)]
    assert all(0 < height <= 4 and 0 < width <= 3 for *_, height, width in small)


def test_iou_window__shows_centres_of_all_that_it_keeps(monkeypatch):
    boxes = torch.tensor([[2.0, 2, 20, 30], [30, 10, 60, 40], [1, 40, 5, 44]])
    windows = set()
    for seed in range(100):
        torch.manual_seed(seed)
        (top, left, height, width), inside = dense_transforms.iou_window(boxes, 48, 64)
        windows.add((top < 0 or left < 0, height < 48 or width < 64))
        x, y = ((boxes[:, :2] + boxes[:, 2:]) / 2)[inside].unbind(1)
        assert inside.any() and height <= 4 * 48 and width <= 4 * 64
        assert ((left < x) & (x < left + width) & (top < y) & (y < top + height)).all()
    assert windows == {(False, False), (False, True), (True, False), (True, True)}
    torch.manual_seed(0)
    assert dense_transforms.iou_window(boxes[:0], 48, 64)[1].shape == (0,)
    # What has its centre elsewhere is left out
    monkeypatch.setattr(dense_transforms, "iou_window", lambda *_: ((0, 0, 46, 64), torch.tensor([True, False])))
    image, target = drawn(1)
    left = DenseTransforms("instances", 40, crop="iou", fixed=True).build(True)(image, target)[1]
    assert left["labels"].tolist() == [1] and len(left["masks"]) == 1


@pytest.mark.parametrize("crop", ["none", "random", "iou"])
def test_objects__none_at_all(crop):
    image, target = drawn(1)
    empty = {key: value[:0] if isinstance(value, torch.Tensor) else value for key, value in target.items()}
    build = DenseTransforms("keypoints", 40, crop=crop, fixed=crop == "iou").build(True, PAIRS)
    for seed in range(10):
        seed_transforms(seed)
        pixels, left = build(image, empty)
        shapes = [tuple(left[key].shape) for key in ("boxes", "keypoints", "masks")]
        assert shapes == [(0, 4), (0, 3, 3), (0, *pixels.shape[1:])]


def test_size__shorter_side_and_at_most_the_longest():
    settings = DenseTransforms("detect", 800, 1333)
    assert settings.size_of(480, 640) == (800, 1067)  # COCO's usual
    assert settings.size_of(400, 1000) == (533, 1333)
    assert DenseTransforms("detect", 480).size_of(480, 960) == (400, 800)  # 1333 to 800 of its own
    assert DenseTransforms("detect", 320, fixed=True).size_of(480, 640) == (320, 320)
    drawn_sizes = [DenseTransforms("detect", 800, 1333, resize=(0.6, 1.0)).size_of(500, 500)[0] for _ in range(300)]
    assert min(drawn_sizes) in range(480, 490) and max(drawn_sizes) in range(790, 801)
    settings = DenseTransforms("segment", 512)  # the factor limits both sides
    assert settings.size_of(512, 683) == (512, 683) and settings.size_of(100, 800) == (256, 2048)
    doubled = DenseTransforms("segment", 512, resize=(2.0, 2.0))
    assert doubled.size_of(512, 683) == (1024, 1366) and doubled.size_of(100, 800) == (512, 4096)


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_evaluation__changes_nothing_and_keeps_crowds(task):
    image, target = drawn(5)
    given = tv_tensors.Mask(target["masks"][0].long()) if task == "segment" else target
    pixels, same = DenseTransforms(task, 20, hflip=1.0, color_jitter=0.5).build(False)(image, given)
    assert torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))
    pairs = (
        [(same, given)] if task == "segment" else [(same[key], target[key]) for key in ("iscrowd", "boxes", "masks")]
    )
    assert all(type(one) is torch.Tensor and torch.equal(one, other) for one, other in pairs)


def scene(seed: int) -> tuple[Image.Image, torch.Tensor]:
    """Classes as colours: 0 black, 1 red, 2 green; and a strip that is ignored, in blue."""
    random = np.random.default_rng(seed)
    mask, colours = np.zeros((40, 60), np.int64), np.zeros((256, 3), np.uint8)
    mask[: random.integers(10, 30), : random.integers(10, 50)] = 1
    mask[-random.integers(5, 20) :, -random.integers(10, 40) :] = 2
    mask[:, 58:] = 255
    colours[1, 0] = colours[2, 1] = colours[255, 2] = 255
    return Image.fromarray(colours[mask]), tv_tensors.Mask(torch.from_numpy(mask))


@pytest.mark.parametrize("resize", [(1.0, 1.0), (0.5, 2.0)])
def test_segment__classes_stay_on_their_colours(resize):
    """And where possible there are more of them than one."""
    build = DenseTransforms("segment", 48, resize=resize).build(True)
    padded = shares = turned = 0
    for seed in range(60):
        seed_transforms(seed)
        image, mask = scene(seed)
        pixels, moved = build(image, mask)
        assert pixels.shape == (3, 48, 48) and moved.shape == (48, 48)
        assert pixels.dtype == torch.uint8 and moved.dtype == torch.int64 and type(moved) is torch.Tensor
        assert set(moved.unique().tolist()) <= {0, 1, 2, 255}
        ground = (pixels == torch.tensor(GROUND, dtype=torch.uint8)[:, None, None]).all(0)
        assert (moved[ground] == 255).all()
        padded += bool(ground.any())
        strip = pixels[2] > 200
        turned += bool(strip[:, :24].any()) and not bool(strip[:, 24:].any())
        assert (moved[strip] == 255).float().mean() > 0.9 if strip.any() else True
        wrong = sum(int(((moved == label) ^ (pixels[label - 1] > 190))[~strip & ~ground].sum()) for label in (1, 2))
        assert wrong <= 90
        counts = torch.bincount(moved[moved != 255])
        shares += bool(counts.max() <= 0.75 * counts.sum())
    assert shares >= 45 and turned > 1
    assert padded == 0 if resize == (1.0, 1.0) else padded > 5


def test_segment__crops_are_drawn_again_if_one_class_fills_them_but_fixed_shows_all(monkeypatch):
    image, mask = scene(1)
    mask[:], mask[:12, :12] = 0, 1
    build, often = DenseTransforms("segment", 12, resize=(3.0, 3.0)).build(True), {}  # 36 x 54, of which 11 x 11 differ
    for tries in (10, 1):
        monkeypatch.setattr(dense_transforms, "TRIES", tries)
        found = []
        for seed in range(100):
            seed_transforms(seed)
            counts = torch.bincount(build(image, mask)[1].flatten(), minlength=2)[:2]
            found.append(bool(counts.max() <= 0.75 * counts.sum()))
        often[tries] = sum(found)
    assert often[10] > 3 * often[1]
    image, mask = scene(2)
    pixels, moved = DenseTransforms("segment", 30, fixed=True, hflip=0.0).build(True)(image, mask)
    assert pixels.shape == (3, 30, 30)
    assert torch.equal(moved, mask.as_subclass(torch.Tensor)[(torch.arange(30) + 0.5).mul(40 / 30).long()][:, 1::2])
    pixels, moved = DenseTransforms("segment", 30).build(True)(image, torch.full_like(mask, 255))
    assert (moved == 255).all()  # of ignored pixels alone


@pytest.mark.parametrize("task", ["detect", "segment"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("crop", ["none", "iou"])
def test_colours__change_the_image_alone_and_by_the_seed(task, mode, crop):
    if task == "segment" and crop == "iou":
        refused("crop='iou' is not known for segment; .* none, random$", DenseTransforms, task, 40, crop=crop)
        return
    image, target = drawn(4) if task == "detect" else scene(4)
    image = image.convert(mode)
    results = []
    for strength in (0.0, 0.5, 0.5):
        settings = DenseTransforms(task, 40, crop=crop, resize=(0.5, 1.5), color_jitter=strength)
        build = pickle.loads(pickle.dumps(settings.build(True)))
        seen = []
        for seed in range(8):
            seed_transforms(7, seed)
            seen.append(build(image, target)[0])
            assert seen[-1].dtype == torch.uint8 and len(seen[-1]) == len(mode.strip("L") or "L")
        results.append(seen)
    without, once, again = results
    assert all(map(torch.equal, once, again)) and len({image.numpy().tobytes() for image in once}) == 8
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(without, once, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(task="classify"), "unknown task 'classify'; .*one of detect, instances, segment, keypoints"),
        (dict(image_size=0), "image_size=0"),
        (dict(resize=(1.0, 0.5)), r"resize=\(1.0, 0.5\); expected pixels, and a smaller and larger factor"),
        (dict(long_side=40), "long_side=40 is below image_size=64"),
        (dict(crop="centre"), "crop='centre' is not known for detect"),
        (dict(hflip=2.0), "hflip=2.0"),
    ],
)
def test_settings__refused_in_one_line(changes, message):
    refused(message, DenseTransforms, **{"task": "detect", "image_size": 64, **changes})


def sample():
    pixels = torch.arange(4 * 6, dtype=torch.uint8).reshape(1, 4, 6).repeat(3, 1, 1)
    masks = torch.zeros(2, 4, 6, dtype=torch.uint8)
    masks[0, 1:3, 0:3] = masks[1, 3, 5] = 1
    target = dict(
        boxes=torch.tensor([[0.0, 1, 3, 3], [5, 3, 6, 4]]),
        labels=torch.tensor([4, 7]),
        area=torch.tensor([5.0, 1.0]),
        masks=masks,
        keypoints=torch.tensor([[[0.5, 1.5, 2.0], [2.5, 2.5, 1.0]], [[5.5, 3.5, 2.0], [0, 0, 0]]]),
        image_id=9,
    )
    return pixels, target


def test_resize_and_crop__by_hand_inside_and_beyond_the_image():
    pixels, target = sample()
    bigger, moved = resize(pixels, target, (8, 18))
    assert bigger.shape == (3, 8, 18) and bigger.dtype == torch.uint8
    lists = {key: moved[key].tolist() for key in ("boxes", "area", "keypoints", "labels")}
    points = [[[1.5, 3, 2], [7.5, 5, 1]], [[16.5, 7, 2], [0, 0, 0]]]
    assert lists == dict(boxes=[[0, 2, 9, 6], [15, 6, 18, 8]], area=[30, 6], keypoints=points, labels=[4, 7])
    assert torch.equal(moved["masks"], target["masks"].repeat_interleave(2, 1).repeat_interleave(3, 2))
    assert moved["image_id"] == 9
    assert target["boxes"].tolist() == [[0, 1, 3, 3], [5, 3, 6, 4]]  # what was given is left alone
    line = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 6)
    resized, nearest = dense_transforms.resize_planes, dense_transforms.NEAREST
    assert resized(line, (1, 2), nearest).tolist() == [[[1, 4]]]  # centres at 1.5 and 4.5
    assert resized(torch.zeros(0, 4, 6, dtype=torch.uint8), (8, 2), nearest).shape == (0, 8, 2)
    pixels, target = sample()
    part, moved = crop(pixels, target, (1, 2, 3, 3))
    assert torch.equal(part, pixels[:, 1:4, 2:5])
    assert moved["boxes"].tolist() == [[-2, 0, 1, 2], [3, 2, 4, 3]]
    left = left_over(moved, 3, 3)
    assert left["boxes"].tolist() == [[0, 0, 1, 2]] and left["labels"].tolist() == [4]
    assert left["masks"].tolist() == [[[1, 0, 0], [1, 0, 0], [0, 0, 0]]]
    assert torch.allclose(left["area"], torch.tensor([5.0 / 3]))  # a third of the box is left
    assert left["keypoints"].tolist() == [[[0, 0, 0], [0.5, 1.5, 1]]]
    pixels, target = sample()
    wide, moved = crop(pixels, target, (-1, -2, 7, 9))
    expected = torch.tensor(GROUND, dtype=torch.uint8)[:, None, None].repeat(1, 7, 9)
    expected[:, 1:5, 2:8] = pixels
    assert torch.equal(wide, expected)
    assert moved["masks"].sum() == target["masks"].sum() and moved["masks"][1, 4, 7] == 1
    assert moved["boxes"].tolist() == [[2, 2, 5, 4], [7, 4, 8, 5]]
    assert left_over(moved, 7, 9)["keypoints"].tolist() == [[[2.5, 2.5, 2], [4.5, 3.5, 1]], [[7.5, 4.5, 2], [0, 0, 0]]]
    # of which nothing is in the window, and of grey images
    assert crop_planes(torch.ones(1, 2, 2, dtype=torch.uint8), (-5, 0, 3, 2), 255).tolist() == [[[255] * 2] * 3]
    assert crop_planes(torch.ones(1, 2, 2, dtype=torch.uint8), (0, 4, 1, 2), 7).tolist() == [[[7, 7]]]
    assert (
        dense_transforms.ground_of(torch.zeros(1, 2, 2)) == (114,)
        and dense_transforms.ground_of(torch.zeros(3, 2, 2)) == GROUND
    )


def test_flip_and_left_over__swap_left_and_right_and_drop_what_is_not_seen():
    pixels, target = sample()
    mirrored, moved = flip(pixels, target, [(0, 1)])
    assert torch.equal(mirrored, pixels[:, :, [5, 4, 3, 2, 1, 0]])
    assert moved["boxes"].tolist() == [[3, 1, 6, 3], [0, 3, 1, 4]]
    assert torch.equal(moved["masks"], target["masks"][:, :, [5, 4, 3, 2, 1, 0]])
    assert moved["keypoints"][0].tolist() == [[3.5, 2.5, 1], [5.5, 1.5, 2]]
    # What is not labelled is so under its new name too, wherever it went.
    assert left_over(moved, 4, 6)["keypoints"][1].tolist() == [[0, 0, 0], [0.5, 3.5, 2]]
    assert flip(pixels, target, ())[1]["keypoints"][0].tolist() == [[5.5, 1.5, 2], [3.5, 2.5, 1]]
    _, target = sample()
    target["boxes"] = torch.tensor([[0.0, 1, 0.9, 3], [5, 3, 6, 4]])
    assert left_over(target, 4, 6)["labels"].tolist() == [7]
    target["masks"][1] = 0
    left = left_over(target, 4, 6)
    shapes = {key: tuple(value.shape) for key, value in left.items() if key != "image_id"}
    assert shapes == dict(boxes=(0, 4), labels=(0,), area=(0,), masks=(0, 4, 6), keypoints=(0, 2, 3))
    assert left["image_id"] == 9
