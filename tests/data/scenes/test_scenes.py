"""Drawn scenes: the same everywhere, true to what they say of themselves, hard for pixels alone; and their cache."""

import hashlib
import pickle
import subprocess
import sys
import types
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import broadsight
from broadsight.data import record_file, scenes
from broadsight.data.record_file import RecordFile
from broadsight.data.scenes import Scene, Scenes, draw_scene, locate
from broadsight.data.scenes.composition import SPLITS, compose
from broadsight.data.scenes.objects import CLASSES, KEYPOINT_PAIRS, KEYPOINTS, PARTS, POINTS, SHAPES, template
from tests.refusals import refused

# The package itself imports torch; an empty stand-in for it shows that scenes need numpy, Pillow and PyYAML alone.
ALONE = f"""
import sys, types
for name, folder in (("broadsight", ""), ("broadsight.data", "/data")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(Path(broadsight.__file__).parent)!r} + folder]
from broadsight.data.scenes import Scenes, draw_scene
"""


def run_alone(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", ALONE + code, *arguments], stdout=subprocess.PIPE, text=True)


def digest(scene: Scene) -> str:
    arrays = [np.ascontiguousarray(value) for value in vars(scene).values()]
    return hashlib.sha256(b"".join(array.tobytes() + str(array.shape).encode() for array in arrays)).hexdigest()


def test_draw_scene__same_in_another_process_and_order_but_not_for_another_index_seed_or_split(capsys):
    code = """
import hashlib
for index, size, without in ((0, 64, None), (7, (40, 72), "salient"), (2**70, 64, "other")):
    scene = draw_scene(index, size=size, without=without)
    hash = hashlib.sha256()
    for array in (scene.image, scene.boxes, scene.masks, scene.keypoints):
        hash.update(array.tobytes())
    print(scene.label, hash.hexdigest())
"""
    process = run_alone(code + 'assert "torch" not in sys.modules')
    np.random.seed(1)  # the global generator must not matter
    exec(code, {"draw_scene": draw_scene})
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and printed == capsys.readouterr().out and printed.count("\n") == 3
    first = [digest(draw_scene(index)) for index in range(6)]
    assert [digest(draw_scene(index)) for index in reversed(range(6))] == first[::-1]
    assert len(set(first)) == 6
    others = [draw_scene(4), draw_scene(3, seed=1), draw_scene(3, split="val"), draw_scene(3 + 2**32)]
    assert len({scene.image.tobytes() for scene in (draw_scene(3), *others)}) == 5


@pytest.mark.parametrize("size", [16, 64, (48, 80), (80, 48), (224, 33)])
def test_draw_scene__consistent_at_every_size(size):
    height, width = (size, size) if isinstance(size, int) else size
    for index in range(12):
        scene = draw_scene(index, size=size)
        count = len(scene.labels)
        assert scene.image.shape == (height, width, 3) and scene.image.dtype == np.uint8
        assert scene.masks.shape == scene.parts.shape == (count, height, width)
        assert scene.masks.dtype == bool and scene.parts.dtype == scene.semantic.dtype == np.uint8
        assert scene.boxes.dtype == scene.keypoints.dtype == np.float32 and scene.labels.dtype == np.int64
        assert scene.keypoints.shape == (count, len(KEYPOINTS), 3)
        assert scene.label == scene.labels[0] and len(set(scene.labels[1:]) & {scene.label}) == 0
        assert scene.masks.any((1, 2)).all() and scene.masks.sum(0).max() == 1
        semantic = np.zeros((height, width), int)
        for label, mask, part, box in zip(scene.labels, scene.masks, scene.parts, scene.boxes, strict=True):
            semantic[mask] = label + 1
            assert ((part > 0) == mask).all() and part.max() <= len(PARTS[CLASSES[label]])
            rows, columns = np.nonzero(mask)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert (scene.semantic == semantic).all()


def test_draw_scene__largest_main_object_mostly_whole_and_the_same_scene_at_other_sizes():
    counts, complete = set(), 0
    for index in range(150):
        scene = draw_scene(index)
        areas = scene.masks.sum((1, 2))
        assert areas[0] == areas.max()
        counts.add(len(areas))
        complete += len(np.unique(scene.parts[0])) - 1 == len(PARTS[CLASSES[scene.label]])
    assert counts == {1, 2, 3, 4} and complete > 0.7 * 150  # an occluder may hide a small part
    for index in range(20):
        small, large = draw_scene(index, size=96), draw_scene(index, size=288)
        assert small.labels.tolist() == large.labels.tolist()
        assert np.abs(small.boxes * 3 - large.boxes).max() <= 6  # two small pixels
        seen = (small.keypoints[..., 2] > 0) & (large.keypoints[..., 2] > 0)
        assert np.allclose(small.keypoints[seen][:, :2] * 3, large.keypoints[seen][:, :2], atol=0.01)
        shrunk = large.image.reshape(96, 3, 96, 3, 3).mean((1, 3))
        assert np.corrcoef(shrunk.ravel(), small.image.ravel())[0, 1] > 0.7  # the noise differs
        assert (small.semantic == large.semantic[1::3, 1::3]).mean() > 0.96


def test_compose__occluder_hides_a_quarter_at_most():
    hidden = []
    for index in range(120):
        plan = compose(index, 0, "train", CLASSES)
        front, mine = len(plan.canvas.owners) - 1, list(plan.things[0].patches.values())
        if front not in mine:
            open_view, covered = (plan.canvas.paint(64, 64, gone) for gone in ([front], []))
            hidden.append(1 - np.isin(covered, mine).sum() / np.isin(open_view, mine).sum())
    assert 25 < len(hidden) < 75 and max(hidden) < 0.3 and np.mean(hidden) > 0.05  # a pixel's width beyond a quarter


def test_wrong_arguments__are_refused_by_sources_at_once_too():
    refused("index=-1", draw_scene, -1)
    for words, wrong in (
        ("unknown split 'dev'; .*expected one of train, val, test", dict(split="dev")),
        ("unknown without 'ears'; .*expected one of salient, other", dict(without="ears")),
        ("expected different ones of crab, fish", dict(classes=("crab", "cow"))),
        ("expected different ones of crab, fish", dict(classes=())),
        (r"size=\(64, 7\); expected at least 8 pixels", dict(size=(64, 7))),
        ("seed=-1; expected non-negative numbers", dict(seed=-1)),
    ):
        for call in (draw_scene, Scenes):
            refused(words, call, 3, **wrong)


def test_classes__some_of_them_and_three_to_five_centred_parts():
    some = [draw_scene(index, classes=("snail", "car")) for index in range(8)]
    assert all(set(scene.labels.tolist()) <= {0, 1} and scene.semantic.max() <= 2 for scene in some)
    assert {scene.label for scene in some[:2]} == {0, 1} and draw_scene(0, classes=("boat",)).labels.tolist() == [0]
    assert 8 <= len(CLASSES) <= 12 and CLASSES == tuple(PARTS) == tuple(POINTS)
    for name, parts in PARTS.items():
        assert 3 <= len(parts) <= 5 and set(parts) == set(SHAPES[name]) and len(set(parts)) == len(parts)
    shape = template("crab")
    for part in range(len(PARTS["crab"])):
        own = shape.points[: -len(KEYPOINTS)][shape.part[: -len(KEYPOINTS)] == part]
        assert np.allclose(own.mean(0), 0)


@pytest.mark.parametrize("without", ["salient", "other"])
def test_without__nothing_else_changes(without):
    for index in range(len(CLASSES)):
        whole, rest = draw_scene(index), draw_scene(index, without=without)
        salient = whole.parts[0] == 1
        gone = salient if without == "salient" else whole.masks[0] & ~salient
        assert gone.any()
        changed = (whole.image != rest.image).any(-1)
        assert not changed[~gone].any() and changed[gone].mean() > 0.9
        left = rest.parts[0]
        assert not (left == 1).any() if without == "salient" else set(np.unique(left)) <= {0, 1}
        assert (left == whole.parts[0])[~gone].all()
        assert rest.label == whole.label and (rest.semantic == whole.semantic)[~gone].all()


def test_without__keypoints_go_with_their_part_and_what_lies_behind_appears():
    for index in range(len(CLASSES)):
        scene, bare = draw_scene(index), draw_scene(index, without="salient")
        name = CLASSES[scene.label]
        if name == "snail":  # the shell sits on the foot
            assert ((scene.parts[0] == 1) & (bare.parts[0] == 1 + PARTS["snail"].index("foot"))).any()
        whole, rest = scene.keypoints[0], bare.keypoints[0]
        lost = (whole[:, 2] > 0) & (rest[:, 2] == 0)
        on_salient = sum(part == PARTS[name][0] for _, _, part in POINTS[name].values())
        assert lost.sum() == on_salient - sum(whole[:, 2] == 0) + len(KEYPOINTS) - len(POINTS[name])


@pytest.mark.parametrize("name", CLASSES)
def test_keypoints__lie_on_their_part(name):
    """Where nothing is in front, a keypoint is on the part that it belongs to, or on one before that."""
    order = list(SHAPES[name])
    checked = 0
    for index in range(12):
        plan = compose(index, 0, "train", (name,))
        scene = draw_scene(index, size=160, classes=(name,))
        for (x, y, visible), part in zip(scene.keypoints[0], plan.things[0].on, strict=True):
            assert (part < 0) <= (visible == 0)
            at = scene.parts[0, int(y), int(x)]
            if visible == 2 and at:
                checked += 1
                assert order.index(PARTS[name][at - 1]) >= order.index(PARTS[name][part])
    assert checked > 30


def test_keypoints__left_and_right_are_the_viewers_and_hidden_ones_covered_by_something():
    points = np.stack([draw_scene(index).keypoints[0] for index in range(60)])
    for left, right in KEYPOINT_PAIRS:
        seen = points[(points[:, left, 2] > 0) & (points[:, right, 2] > 0)]
        assert len(seen) > 40 and (seen[:, left, 0] < seen[:, right, 0]).all()
    states = Counter()
    for index in range(80):
        scene = draw_scene(index, size=96)
        for points, mask in zip(scene.keypoints, scene.masks, strict=True):
            for x, y, state in points:
                states[int(state)] += 1
                assert not state or (0 <= x < 96 and 0 <= y < 96 and mask[int(y), int(x)] <= (state == 2))
    assert states[2] > 8 * states[1] > 0


def test_locate__constructed_cases():
    mask = np.zeros((10, 20), bool)
    mask[4:6, 9:12] = True
    points = [(0.0, 0.0), (-0.8, 0.0), (0.0, 0.0), (0.0, 0.0), (2.0, 0.0), (0.2, 0.2)]
    thing = types.SimpleNamespace(centre=(0.5, 0.5), keypoints=np.array(points), on=[0, 0, -1, 1, 0, 0])
    assert locate(thing, mask, gone=[1]).tolist() == [
        [10, 5, 2],  # on the object
        [2, 5, 1],  # in the image, but something else is seen there
        [0, 0, 0],  # the object has none
        [0, 0, 0],  # its part was taken away
        [0, 0, 0],  # outside of the image
        [12, 7, 1],  # two pixels off
    ]


def test_scenes__labels_are_balanced_shuffled_and_known_without_drawing(monkeypatch):
    source = Scenes(30, split="val", seed=5)
    labels = [source.scene(i).label for i in range(30)]
    monkeypatch.setattr(scenes, "compose", None)
    assert [source.label(i) for i in range(30)] == labels
    for count in (200, 203):
        labels = [Scenes(count).label(i) for i in range(count)]
        assert set(Counter(labels).values()) <= {count // 10, -(-count // 10)}
    assert len({tuple(labels[i : i + 10]) for i in range(0, 200, 10)}) == 20


def test_scenes__as_a_source_whose_splits_share_nothing():
    source = Scenes(12, size=(32, 48), split="val", without="salient")
    assert len(source) == 12 and source.classes == CLASSES and source.name(7) == "scenes/val/000007"
    image = source.open(7)
    assert image.mode == "RGB" and image.size == (48, 32)
    assert (np.asarray(image) == source.scene(7).image).all()
    for i in (-1, 12):
        refused(f"scene {i} of 12", source.open, i, error=IndexError)
    images = {split: {Scenes(60, size=16, split=split).open(i).tobytes() for i in range(60)} for split in SPLITS}
    assert [len(kept) for kept in images.values()] == [60, 60, 60]
    assert not images["train"] & images["val"] and not images["val"] & images["test"]


def test_scenes__pickle_is_small_and_memory_keeps_what_was_drawn(tmp_path, monkeypatch):
    for source in (Scenes(100), Scenes(100, cache=tmp_path)):
        images = [source.open(i).tobytes() for i in range(20)]
        packed = pickle.dumps(source)
        assert len(packed) < 2000
        assert [pickle.loads(packed).open(i).tobytes() for i in range(20)] == images
    source = Scenes(4, size=32)
    before = source.open(1)
    before.putpixel((0, 0), (1, 2, 3))  # the caller's copy
    monkeypatch.setattr(scenes, "compose", None)
    assert (np.asarray(source.open(1))[0, 0] != (1, 2, 3)).any()
    refused("", source.open, 2, error=TypeError)
    monkeypatch.undo()
    monkeypatch.setattr(scenes, "MEMORY", 4 * 32 * 32 * 3 - 1)  # too many for it
    source = Scenes(4, size=32)
    source.open(1)
    assert not source.kept


def test_scenes__pixels_alone_tell_little():
    """Ridge regression, the best linear classifier in closed form, on 1,000 images of 16 pixels: chance is 10 %."""

    def data(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        source = Scenes(count, size=16, split=split)
        images = np.stack([np.asarray(source.open(i)) for i in range(count)]).reshape(count, -1) / 255.0 - 0.5
        return np.c_[images, np.ones(count)], np.array([source.label(i) for i in range(count)])

    (x, y), (x_val, y_val) = data("train", 1000), data("val", 400)
    weights = np.linalg.solve(x.T @ x + 30 * np.eye(x.shape[1]), x.T @ np.eye(10)[y])
    assert (np.argmax(x @ weights, 1) == y).mean() > 0.4  # it does fit what it has seen
    assert (np.argmax(x_val @ weights, 1) == y_val).mean() < 0.2


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.npy")
    return path


def test_cache__drawn_once_and_sets_do_not_mix_nor_does_what_other_code_has_drawn(tmp_path, monkeypatch):
    sets = [dict(), dict(count=4), dict(size=32), dict(seed=1), dict(split="val"), dict(without="salient")]
    for settings in (*sets, dict(classes=("crab", "car"))):
        Scenes(**{"count": 3, "size": 16, **settings}, cache=tmp_path).open(0)
    monkeypatch.setattr(scenes, "drawing_version", lambda: "later")
    Scenes(3, size=16, cache=tmp_path).open(0)
    assert len(list(tmp_path.iterdir())) == 8
    images = [Scenes(5, size=24, cache=tmp_path / "new").open(i).tobytes() for i in range(5)]
    assert images == [draw_scene(i, size=24).image.tobytes() for i in range(5)]
    mapped = np.load(the_file(tmp_path / "new"), mmap_mode="r")
    assert mapped["data"].shape == (5, 24, 24, 3) and [row.tobytes() for row in mapped["data"]] == images
    monkeypatch.setattr(scenes, "compose", None)
    assert [Scenes(5, size=24, cache=tmp_path / "new").open(i).tobytes() for i in range(5)] == images


def test_cache__two_processes_at_once(tmp_path):
    code = """
source = Scenes(150, size=32, cache=sys.argv[1])
for i in range(150):
    assert source.open(i).tobytes() == draw_scene(i, size=32).image.tobytes(), i
"""
    both = [run_alone(code, str(tmp_path)) for _ in range(2)]
    assert [process.communicate(timeout=60) and process.returncode for process in both] == [0, 0]
    stored = np.load(the_file(tmp_path))
    assert list(tmp_path.iterdir()) == [the_file(tmp_path)]  # no unfinished file is left
    for i in range(0, 150, 10):
        assert stored["data"][i].tobytes() == draw_scene(i, size=32).image.tobytes()


def test_cache__a_crash_halfway(tmp_path):
    """Whatever part of a record reached the disk, and in whatever order, it is not taken for an image."""
    source = Scenes(3, size=16, cache=tmp_path)
    right = source.open(1).tobytes()
    path = the_file(tmp_path)
    start = len(source.store.header) + source.store.record
    whole = path.read_bytes()
    for lost in (slice(start + 300, start + 772), slice(start + 4, start + 400), slice(start, start + 4)):
        broken = bytearray(whole)
        broken[lost] = bytes(lost.stop - lost.start)
        path.write_bytes(broken)
        assert RecordFile(path, 3, (16, 16, 3)).read(1) is None
        assert Scenes(3, size=16, cache=tmp_path).open(1).tobytes() == right
        assert path.read_bytes() == whole  # and it was put right


@pytest.mark.parametrize(
    ("kept", "more"), [(slice(-100), b""), (slice(None), b"x"), (slice(0), b""), (slice(0), b"hello\n" * 1000)]
)
def test_cache__damaged_file_is_rebuilt(tmp_path, kept, more):
    right = Scenes(3, size=16, cache=tmp_path).open(2).tobytes()
    path = the_file(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[kept] + more, bytes(20) + whole[20:]):  # of another length, or of another header
        path.write_bytes(damaged)
        assert Scenes(3, size=16, cache=tmp_path).open(2).tobytes() == right
        assert path.read_bytes() == whole


def test_cache__shortened_or_gone_while_in_use_or_never_made(tmp_path):
    source = Scenes(3, size=16, cache=tmp_path)
    images = [source.open(i).tobytes() for i in range(3)]
    path = the_file(tmp_path)
    path.write_bytes(path.read_bytes()[:900])
    assert [source.open(i).tobytes() for i in range(3)] == images
    path.unlink()
    with pytest.warns(RuntimeWarning, match="images are not kept"):
        assert [source.open(i).tobytes() for i in range(3)] == images
    (tmp_path / "file").write_text("in the way")
    source = Scenes(3, size=16, cache=tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="images are not kept"):
        assert source.open(0).tobytes() == draw_scene(0, size=16).image.tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        assert source.open(1).tobytes() == draw_scene(1, size=16).image.tobytes()


@pytest.mark.parametrize("method", ["open", "mkdir"])
def test_cache__folder_may_not_be_written(tmp_path, monkeypatch, method):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, method, refuse)  # root, who may run the tests, is never refused
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert Scenes(3, size=16, cache=tmp_path).open(0).tobytes() == draw_scene(0, size=16).image.tobytes()


def test_cache__full_disk():
    """/dev/full takes no byte: the record cannot be written, the image is there all the same."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    source = Scenes(3, size=16, cache="/nowhere")
    source.store.path, source.store.state = Path("/dev/full"), "usable"
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert source.open(0).tobytes() == draw_scene(0, size=16).image.tobytes()
    assert source.store.state == "unusable"


def test_record_file__unwritten_records_are_not_there(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "a.npy", 3, (2, 2))
    assert [file.read(i) for i in range(3)] == [None, None, None]
    file.write(1, np.zeros((2, 2), np.uint8))
    assert file.read(0) is None and file.read(2) is None and file.read(1).tolist() == [[0, 0], [0, 0]]
    monkeypatch.setattr(record_file.zlib, "crc32", lambda data: 0)
    assert record_file.checksum(b"anything") != bytes(4)
