"""What is counted of dense models: regions by hand; the papers' tables check the rest (tests/papers/test_dense.py)."""

from broadsight.dense import build
from broadsight.dense.counting import BOXES, REGIONS, Counted
from broadsight.inspection.macs import count_calls

from .heads.small import FEW


def macs(head: str, **options) -> int:
    return count_calls(Counted(build(head, "test_resnet", 1, **FEW, **options)), (1, 3, 64, 96))[0]


def test_regions__by_hand_whatever_is_found():
    boxes = macs("faster_rcnn")
    more = macs("faster_rcnn", box_score_thresh=0.0, image_size=(128, 128))
    assert boxes == more > BOXES * (49 * 32 * 32 + 32 * 32 + 32 * 2 * 5)
    poses = macs("keypoint_rcnn", num_keypoints=4, keypoint_layers=(16, 8)) - boxes
    assert poses == REGIONS * 14**2 * (9 * (32 * 16 + 16 * 8) + 16 * 8 * 4)
    masks = macs("mask_rcnn") - boxes
    assert masks == REGIONS * (14**2 * (4 * 9 * 32**2 + 4 * 32**2) + 28**2 * 32 * 2)
