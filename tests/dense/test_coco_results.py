"""Predictions as COCO's result files: values by hand, and COCO's own tools read them."""

import copy
import json

import pytest
import torch

from broadsight.dense.average_precision import to_results, write_results

pytest.importorskip("pycocotools", reason="the extra `det` is not installed")

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.refusals import refused

CATEGORY_IDS = {1: 3, 2: 90}


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
    first, second = to_results("a", prediction, CATEGORY_IDS)
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


def test_to_results__nothing_found_or_a_label_without_a_category(prediction):
    assert to_results(1, {key: value[:0] for key, value in prediction.items()}, CATEGORY_IDS) == []
    refused("label 2 has no category; expected labels 1 to 1", to_results, 1, prediction, {1: 3})


@pytest.mark.parametrize("name", ["bbox", "segm"])
def test_file__pycocotools_reads_and_finds_all(prediction, tmp_path, name):
    path = tmp_path / "results.json"
    entries = to_results(7, prediction, CATEGORY_IDS)
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
