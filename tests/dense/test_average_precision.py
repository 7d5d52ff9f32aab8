"""AP of boxes, masks and keypoints, and result files: COCO's own tools say the same of random and real annotations."""

import copy
import json
import math
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broadsight.data.sources.coco import CocoDataset
from broadsight.dense import average_precision
from broadsight.dense.average_precision import AveragePrecision, first_of_each, group, to_results, write_results
from tests.refusals import refused

pytest.importorskip("pycocotools", reason="the extra `det` is not installed")
pytest.importorskip("faster_coco_eval", reason="the extra `det` is not installed")

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from .coco_scenes import CATEGORY_IDS, EVALUATED, NAMES, as_file, by_name, entries, pycoco, scene

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def scenes():
    torch.manual_seed(3)
    random.seed(3)
    numbers = random.sample(range(1000, 9000), 25)  # ids in no order
    return [(image_id, scene(number, 17)) for number, image_id in enumerate(numbers)]


def collect(scenes: list[tuple], kinds=("box", "mask", "keypoint")) -> AveragePrecision:
    metric = AveragePrecision(kinds, CATEGORY_IDS, NAMES)
    for image_id, (size, found, there) in scenes:
        metric.update(image_id, size, found, there)
    return metric


@pytest.mark.parametrize(("kind", "sigmas"), [*((kind, None) for kind in EVALUATED), ("keypoint", [0.05] * 5)])
def test_figures__are_those_of_pycocotools(scenes, kind, sigmas):
    if sigmas:  # keypoints of another number have equal tolerances
        scenes = [(number, scene(number, 5)) for number in range(12)]
    results = [entry for image_id, (_, found, _) in scenes for entry in entries(kind, image_id, found)]
    theirs = by_name(kind, pycoco(kind, as_file(scenes), results, sigmas))
    ours = collect(scenes, [kind]).compute()
    assert list(ours) == list(theirs)
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0, nan_ok=True)
    assert (1 if sigmas else 5) < ours[f"{kind}_ap"] < 95  # neither nothing nor everything is found


def test_classes__compared_apart_give_the_same_and_keypoints_must_agree(scenes, monkeypatch):
    expected = collect(scenes).compute()
    monkeypatch.setattr(average_precision, "AT_ONCE", 60)
    assert collect(scenes).compute() == pytest.approx(expected, abs=1e-9, rel=0, nan_ok=True)
    numbers = np.array([0, 5, 5, 1, 20, 0, 3])
    assert group([1, 2, 3, 4, 5, 6], numbers, 10) == [[1, 2], [3], [4], [5, 6]]
    assert group([1, 2], numbers, 100) == [[1, 2]]
    metric = AveragePrecision(["keypoint"], {1: 1}, ["thing"])
    for image_id, count in enumerate((3, 4)):
        found, there = one(keypoints=torch.ones(1, count, 3))
        metric.update(image_id, (100, 100), found | {"keypoints": there["keypoints"]}, there)
    refused(r"objects have \[3, 4\] keypoints; expected the same number everywhere", metric.compute)


def test_per_class__is_pycocotools_table_of_a_class(scenes):
    results = [entry for image_id, (_, found, _) in scenes for entry in entries("box", image_id, found)]
    precision = pycoco("box", as_file(scenes), results).eval["precision"]
    rows = collect(scenes).per_class()
    assert [row["name"] for row in rows] == list(NAMES)
    for place, row in enumerate(rows[:3]):
        for name, ious in (("ap", slice(None)), ("ap50", 0), ("ap75", 5)):
            assert row[f"box_{name}"] == pytest.approx(100 * precision[ious, :, place, 0, -1].mean(), abs=1e-6)
        kept = [(there["labels"] == place + 1) & (there["iscrowd"] == 0) for _, (_, _, there) in scenes]
        assert row["objects"] == sum(int(one.sum()) for one in kept) > 0
    assert rows[3]["objects"] == 0
    assert all(math.isnan(rows[3][f"{kind}_{name}"]) for kind in EVALUATED for name in ("ap", "ap50", "ap75"))


def test_merge__no_order_matters_and_all_keep_the_same_of_an_image_seen_differently(scenes):
    whole = collect(scenes)
    expected = whole.compute()
    parts = [pickle.loads(pickle.dumps(collect(part).state())) for part in (scenes[::2], scenes[1::2], scenes[:5])]
    for order in ([0, 1, 2], [2, 1, 0]):
        metric = collect(scenes[::2])  # its own state comes again among all
        metric.merge(parts[i] for i in order)
        assert metric.compute() == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert len(metric.state()) == len(scenes)
    image_id, (size, found, there) = scenes[1]
    other = (image_id, (size, found | {"scores": found["scores"].flip(0)}, there))
    first, second = collect([scenes[1]]), collect([other])
    states = first.state(), second.state()
    first.merge(states)
    second.merge(states)
    kept = [metric.state()[0][1]["found"]["scores"].tolist() for metric in (first, second)]
    assert kept[0] == kept[1] in (found["scores"].tolist(), found["scores"].flip(0).tolist())


def one(box=(10.0, 10.0, 50.0, 50.0), label=1, score=0.9, **more) -> tuple[dict, dict]:
    """A prediction that is exact, and its target."""
    there = dict(boxes=torch.tensor([box]), labels=torch.tensor([label]), **more)
    return dict(boxes=torch.tensor([box]), labels=torch.tensor([label]), scores=torch.tensor([score])), there


def test_compute__by_hand_and_coverage_of_classes_that_have_objects_that_count():
    metric = AveragePrecision(["box"], {1: 1}, ["thing"])
    found, there = one()
    metric.update("a", (100, 100), found, there)
    metric.update("b", (100, 100), {key: value[:0] for key, value in found.items()}, there)  # missed
    figures = metric.compute()
    # One of two is found without a false one: precision 1 at the 51 recalls from 0 to 0.5, and 0 at the other 50.
    assert figures["box_ap"] == figures["box_ap50"] == pytest.approx(100 * 51 / 101)
    assert figures["box_ar1"] == figures["box_ar100"] == figures["box_ar_medium"] == 50
    assert math.isnan(figures["box_ap_small"]) and math.isnan(figures["box_ar_large"])
    metric.update("b", (100, 100), found, there)  # it comes again, and is found
    assert metric.compute()["box_ap"] == pytest.approx(100)
    metric.reset()
    assert math.isnan(metric.compute()["box_ap"])
    metric = AveragePrecision(["box"], {1: 1, 2: 2, 3: 3}, ["a", "b", "c"])
    assert metric.coverage() == (0, 3)
    found, there = one()
    nothing = {key: value[:0] for key, value in found.items()}
    metric.update("empty", (100, 100), nothing, {key: value[:0] for key, value in there.items()})
    crowd, of_crowd = one(label=3, iscrowd=torch.tensor([1]))
    metric.update("crowd", (100, 100), crowd, of_crowd)
    assert metric.coverage() == (0, 3) and math.isnan(metric.compute()["box_ap"])  # nothing to be found, some found
    metric.update("a", (100, 100), nothing, there)  # to be found, and nothing found
    assert metric.coverage() == (1, 3) and metric.compute()["box_ap"] == 0
    found, there = one(label=2)
    metric.update("b", (100, 100), found, there)
    assert metric.coverage() == (2, 3) and metric.compute()["box_ap"] == pytest.approx(50)
    assert [row["objects"] for row in metric.per_class()] == [1, 1, 0]
    metric = AveragePrecision(["keypoint"], {1: 1}, ["thing"])  # that nobody has labelled
    found, there = one(keypoints=torch.zeros(1, 3, 3))
    metric.update("a", (100, 100), found | {"keypoints": torch.ones(1, 3, 3)}, there)
    assert metric.coverage() == (0, 1) and math.isnan(metric.compute()["keypoint_ap"])


@pytest.mark.parametrize(
    ("kinds", "size", "other"), [(["box"], "medium", "small"), (["box", "mask"], "small", "medium")]
)
def test_area__without_one_it_is_the_mask_s_or_the_box_s(kinds, size, other):
    mask = torch.zeros(1, 100, 100, dtype=torch.uint8)
    mask[0, 10:30, 10:30] = 1  # 400 pixels in a box of 1600
    found, there = one(masks=mask)
    metric = AveragePrecision(kinds, {1: 1}, ["thing"])
    metric.update(1, (100, 100), found | {"masks": mask[:, None].float()}, there)
    figures = metric.compute()
    assert figures[f"box_ar_{size}"] == 100 and math.isnan(figures[f"box_ar_{other}"])


def test_images__ids_decide_ties_the_best_are_kept_and_masks_are_runs():
    found, there = one()
    wrong = dict(found, boxes=found["boxes"] + 45)
    for early, late in ((9, 10), ("a", "b"), (torch.tensor(2), torch.tensor(11)), (10, "1")):
        metric = AveragePrecision(["box"], {1: 1}, ["thing"])
        metric.update(late, (100, 100), wrong, {key: value[:0] for key, value in there.items()})
        metric.update(early, (100, 100), found, there)
        assert metric.compute()["box_ap"] == pytest.approx(100)  # the right one goes first, though it came last
    labels, scores = np.array([1, 2, 1, 1, 2, 1]), np.array([0.1, 0.5, 0.7, 0.7, 0.6, 0.7])
    kept = {most: first_of_each(labels, scores, most).tolist() for most in (1, 2, 6)}
    assert kept == {1: [2, 4], 2: [1, 2, 3, 4], 6: [0, 1, 2, 3, 4, 5]}
    masks, boxes = torch.zeros(50, 1, 400, 400), torch.tensor([[100.0, 100, 300, 300]]).repeat(50, 1)
    masks[:, :, 100:300, 100:300] = 1
    found = dict(boxes=boxes, labels=torch.ones(50, dtype=torch.int64), scores=torch.rand(50), masks=masks)
    metric = AveragePrecision(["box", "mask"], {1: 1}, ["thing"])
    metric.update(1, (400, 400), found, dict(found, masks=masks[:, 0].byte()))
    assert len(pickle.dumps(metric.state())) < 100 * 1000  # of 8 million pixels


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(labels=torch.tensor([5])), "image 7: label 5 has no category; expected labels 1 to 4"),
        (dict(scores=torch.tensor([math.nan])), "image 7: scores are not all finite"),
        (dict(masks=torch.zeros(1, 1, 50, 9)), r"image 7: masks are of height, width \(50, 9\); expected \(100, 100\)"),
        (dict(masks=None), "image 7 has no masks"),
    ],
)
def test_update__errors_name_the_image(change, words):
    found, there = one(masks=torch.zeros(1, 100, 100))
    found = {k: v for k, v in (found | dict(masks=torch.zeros(1, 1, 100, 100)) | change).items() if v is not None}
    refused(words, AveragePrecision(["mask"], CATEGORY_IDS, NAMES).update, 7, (100, 100), found, there)


@pytest.mark.parametrize("package", ["faster_coco_eval", "pycocotools"])
def test_constructor__says_which_package_is_missing(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = r'run: pip install "broadsight\[det\]"'
    refused(words, AveragePrecision, ["box"], CATEGORY_IDS, NAMES, error=ImportError)


def perturbed(data: CocoDataset, kinds: list[str], places: list[int]) -> list[tuple[Any, tuple[int, int], dict, dict]]:
    """Ground truth of images, and predictions made of it: moved, doubled, relabelled, left out."""
    seen = []
    for i in places:
        there = data.target(i)
        height, width = there["boxes"].canvas_size
        boxes = torch.as_tensor(there["boxes"])
        rows = torch.randint(0, len(boxes), (len(boxes) + 2,)) if len(boxes) else torch.zeros(0, dtype=torch.int64)
        sides = (boxes[rows, 2:] - boxes[rows, :2]).repeat(1, 2)
        moved = boxes[rows] + torch.randn(len(rows), 4) * 0.06 * sides * (torch.rand(len(rows), 1) > 0.3)
        labels = torch.where(torch.rand(len(rows)) > 0.1, there["labels"][rows], 1)
        found = dict(boxes=moved, labels=labels, scores=torch.rand(len(rows)))
        if "mask" in kinds:
            masks = torch.as_tensor(there["masks"])[rows]
            steps = torch.randint(-4, 5, (len(rows), 2)).tolist()
            shifted = [mask.roll(step, (0, 1)) for mask, step in zip(masks, steps, strict=True)]
            found["masks"] = torch.stack([torch.zeros(height, width), *shifted])[1:, None].float()
        if "keypoint" in kinds:
            points = there["keypoints"][rows].clone()
            points[..., :2] += torch.randn(*points.shape[:2], 2) * 0.03 * sides[:, None, :2]
            found["keypoints"] = points
        seen.append((there["image_id"], (height, width), found, there))
    return seen


@pytest.mark.parametrize(
    "file, kinds, step",
    [
        ("coco/instances.json", ["box", "mask"], 4),
        ("coco_keypoints/person_keypoints.json", ["box", "mask", "keypoint"], 1),
    ],
)
def test_real_annotations__same_as_pycocotools_on_the_file_itself(file, kinds, step):
    if not (DATA / file).exists():
        pytest.skip(f"{file} is not beside the repository")
    data, content = CocoDataset(DATA / file, keypoints="keypoint" in kinds), json.loads((DATA / file).read_text())
    # One that reaches out of its image, which CocoDataset clips for training
    reaching = [item["image_id"] for item in content["annotations"] if item["id"] == 1463315]
    ids = [image["id"] for image in content["images"]]
    places = sorted({*range(0, len(data), step), *(ids.index(image_id) for image_id in reaching)})
    kept = {ids[place] for place in places}
    for name, key in (("images", "id"), ("annotations", "image_id")):
        content[name] = [item for item in content[name] if item[key] in kept]
    if step > 1:
        assert reaching and any(item["iscrowd"] for item in content["annotations"])
    seen = perturbed(data, kinds, places)
    metric = AveragePrecision(kinds, data.category_ids, data.classes)
    for one_image in seen:
        metric.update(*one_image)
    ours = metric.compute()
    for kind in kinds:
        results = [row for image_id, _, found, _ in seen for row in entries(kind, image_id, found, data.category_ids)]
        theirs = by_name(kind, pycoco(kind, content, results))
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-6, rel=0, nan_ok=True)
        assert 10 < theirs[f"{kind}_ap"] < 95


IDS = {1: 3, 2: 90}


@pytest.fixture
def prediction():
    masks = torch.zeros(2, 1, 4, 5)
    masks[0, 0, 1:3, 2:4] = 0.9
    masks[1, 0, :, 0] = 0.6
    masks[1, 0, :, 1] = 0.5  # not above it
    return dict(
        boxes=torch.tensor([[2.0, 1.0, 4.0, 3.0], [0.00012345, 0, 1, 3.98765]]),
        labels=torch.tensor([2, 1]),
        scores=torch.tensor([0.75, 0.123456789]),
        masks=masks,
        keypoints=torch.tensor([[[2.0, 1, 1], [3.5, 2.25, 1]], [[0, 0, 1], [1, 3, 1]]]),
    )


def test_to_results__by_hand(prediction):
    first, second = to_results("a", prediction, IDS)
    assert first == dict(
        image_id="a",
        category_id=90,
        score=0.75,
        bbox=[2, 1, 2, 2],
        # down the columns 9 2 2 2 5; from the 4th on less the one before last
        segmentation=dict(size=[4, 5], counts="92203"),
        keypoints=[2, 1, 1, 3.5, 2.25, 1],
    )
    assert (second["category_id"], second["score"], second["bbox"]) == (3, 0.123457, [0, 0, 1, 3.988])
    assert second["segmentation"] == dict(size=[4, 5], counts="04`0")  # 0 out, 4 in, 16 out
    json.dumps([first, second])  # nothing of torch or numpy is left
    assert to_results(1, {key: value[:0] for key, value in prediction.items()}, IDS) == []
    refused("label 2 has no category; expected labels 1 to 1", to_results, 1, prediction, {1: 3})


@pytest.mark.parametrize("name", ["bbox", "segm"])
def test_file__pycocotools_reads_and_finds_all(prediction, tmp_path, name):
    path = tmp_path / "results.json"
    entries = to_results(7, prediction, IDS)
    write_results(iter(entries), path)
    assert list(tmp_path.iterdir()) == [path]
    there = COCO()
    there.dataset = dict(
        images=[dict(id=7, height=4, width=5)],
        categories=[dict(id=3, name="cat"), dict(id=90, name="brush")],
        annotations=[dict(copy.deepcopy(row), id=i + 1, area=4, iscrowd=0) for i, row in enumerate(entries)],
    )
    there.createIndex()
    run = COCOeval(there, there.loadRes(str(path)), name)
    run.evaluate()
    run.accumulate()
    run.summarize()
    assert run.stats[0] == pytest.approx(1)
    refused("JSON compliant", write_results, [dict(score=float("nan"))], path)
    assert json.loads(path.read_text()) == entries and list(tmp_path.iterdir()) == [path]  # the old file survives
