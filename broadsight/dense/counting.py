"""Dense models as they are counted: without what depends on an image's content."""

from typing import Any

from torch import Tensor, nn

CLASSES = {"detect": 80, "instances": 80, "keypoints": 1, "segment": 150}  # of COCO and, for segmentation, of ADE20K
BOXES, REGIONS = 1000, 100  # regions that box heads of an R-CNN are counted on, and heads for masks and keypoints


class Counted(nn.Module):
    """A dense model whose call runs all that is counted for images (B, C, H, W), and gives nothing."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, images: Tensor) -> None:
        model = self.model
        if hasattr(model, "roi_heads"):
            maps = model.backbone(model.transform.normalize(images))
            model.rpn.head(list(maps.values()))
            for heads in getattr(model.roi_heads, "steps", [model.roi_heads]):  # the stages of a cascade
                for part, count in (("box", BOXES), ("mask", REGIONS), ("keypoint", REGIONS)):
                    if (pool := getattr(heads, f"{part}_roi_pool", None)) is not None:
                        regions = images.new_zeros(count, model.backbone.out_channels, *pool.output_size)
                        getattr(heads, f"{part}_predictor")(getattr(heads, f"{part}_head")(regions))
        elif hasattr(model, "raw"):
            model.raw(images)
        else:
            model(images)
