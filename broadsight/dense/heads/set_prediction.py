"""Detection without suppression: RT-DETR (Zhao et al., CVPR 2024), whose queries predict one box each."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from ..detector import check_labels, freeze_unused, in_float32
from ..inference import resized
from ..stages import Normalise, Stages
from . import register

FIRST = 1  # of the maps that are used, at strides 8, 16, 32
LOSSES = {"loss_vfl": "class", "loss_bbox": "box", "loss_giou": "giou"}  # in transformers, and here


@register("rtdetr", "detect", square=True)
class RTDETR(nn.Module):
    """Images, a list of (C, H_i, W_i) with values from 0 to 1, -> a list of dicts of boxes, labels and scores.

    The best first, in pixels of the given image. In train mode, with targets (dicts of boxes (N, 4) and labels (N,)
    from 1), a dict of losses to be summed: "class", "box" and "giou". Most is of transformers, the extra `hf`.

    Args:
        queries: Number of boxes; 300 if None, or the number of positions if that is less.
        image_size: (H, W), multiples of 32, that images are resized to, in training too, whatever their aspect.
        denoising: Queries about noisy copies of the true boxes in training; 0 for none.
        detections_per_img, score_thresh: Most predictions for an image, and the lowest score that one may have.
    """

    task = "detect"

    def __init__(
        self,
        stages: Stages,
        num_classes: int,
        *,
        queries: int | None = None,
        image_size: tuple[int, int] = (640, 640),
        channels: int = 256,
        heads: int = 8,
        feed_forward: int = 1024,
        encoder_layers: int = 1,
        decoder_layers: int = 6,
        denoising: int = 100,
        detections_per_img: int = 100,
        score_thresh: float = 0.0,
    ):
        super().__init__()
        try:
            import scipy  # noqa: F401  matches boxes
            import transformers
        except ImportError as error:
            raise ImportError(f"rtdetr needs {error.name}; pip install broadsight[hf]") from None
        height, width = image_size
        if height % 32 or width % 32:
            raise ValueError(f"image_size={height}x{width} of rtdetr; expected multiples of 32")
        positions = sum((height // stride) * (width // stride) for stride in stages.strides[FIRST:])
        queries = min(300, positions) if queries is None else queries
        if queries > positions:
            raise ValueError(f"queries={queries}; image_size={height}x{width} has {positions} positions at most")
        if channels % heads or channels % 4:
            raise ValueError(f"channels={channels}; expected a multiple of heads={heads} and of 4")
        self.stages, self.num_classes, self.image_size = stages, num_classes, (height, width)
        self.detections_per_img, self.score_thresh = detections_per_img, score_thresh
        self.normalise = Normalise(stages)
        freeze_unused(stages, FIRST)
        widths, theirs = list(stages.channels[FIRST:]), cast(Any, transformers)
        # A backbone that is replaced at once, to say how many channels the maps have
        sizes: Any = dict(embedding_size=8, hidden_sizes=[8, *widths], depths=[1, 1, 1, 1], layer_type="bottleneck")
        backbone = theirs.RTDetrResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])
        encoder: Any = dict(encoder_in_channels=widths, encoder_hidden_dim=channels, encoder_layers=encoder_layers)
        encoder |= dict(encoder_ffn_dim=feed_forward, encoder_attention_heads=heads, d_model=channels)
        decoder: Any = dict(decoder_in_channels=[channels] * len(widths), decoder_layers=decoder_layers)
        decoder |= dict(decoder_ffn_dim=feed_forward, decoder_attention_heads=heads, num_queries=queries)
        other: Any = dict(num_labels=num_classes, num_denoising=denoising, initializer_bias_prior_prob=0.01)
        other |= dict(backbone_config=backbone, freeze_backbone_batch_norms=False)
        self.detector: Any = theirs.RTDetrForObjectDetection(theirs.RTDetrConfig(**encoder, **decoder, **other))
        self.detector.model.backbone = GivenMaps()
        initialise(self.detector)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if self.training and targets is None:
            raise ValueError("rtdetr in train mode was given no targets; pass them or call model.eval()")
        batch = self.normalise(torch.stack([resized(image, self.image_size) for image in images]))
        maps = self.stages(batch)[FIRST:]
        if not self.training:
            found = self.detector(batch, pixel_mask=maps)
            return self.predictions(found.logits.float(), found.pred_boxes.float(), [x.shape[-2:] for x in images])
        check_labels([target["labels"] for target in targets or ()], self.num_classes)
        labels = [self.as_shares(target, image) for target, image in zip(targets or (), images, strict=True)]
        return self.losses(self.detector(batch, pixel_mask=maps, labels=labels).loss_dict, labels)

    def as_shares(self, target: dict[str, Tensor], image: Tensor) -> dict[str, Tensor]:
        """A target for transformers: centre, width and height as shares of the image's sides; labels from 0."""
        height, width = image.shape[-2:]
        boxes = torch.as_tensor(target["boxes"]).reshape(-1, 4).float()
        shares = box_convert(boxes, "xyxy", "cxcywh") / boxes.new_tensor([width, height, width, height])
        return {"class_labels": target["labels"] - 1, "boxes": shares}

    def losses(self, parts: dict[str, Tensor], labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The losses of all layers, which are weighted already, in three sums."""
        sums = {}
        for start, name in LOSSES.items():
            sums[name] = torch.stack([loss for part, loss in parts.items() if part.startswith(start)]).sum()
        if self.detector.config.num_denoising and not any(len(label["boxes"]) for label in labels):
            # Without objects there are no noisy copies: the embedding of their classes still needs a gradient
            sums["class"] = sums["class"] + 0 * self.detector.model.denoising_class_embed.weight.sum()
        return sums

    def predictions(self, logits: Tensor, boxes: Tensor, sizes: list[tuple[int, ...]]) -> list[dict[str, Tensor]]:
        """The best of all queries and classes. Queries are trained to find different objects: none is suppressed."""
        scores, index = logits.sigmoid().flatten(1).topk(min(self.detections_per_img, logits[0].numel()))  # B D
        boxes = box_convert(boxes, "cxcywh", "xyxy").clamp(0, 1)
        boxes = boxes.gather(1, (index // self.num_classes)[..., None].expand(-1, -1, 4))
        results = []
        for row, best, place, (height, width) in zip(boxes, scores, index, sizes, strict=True):
            kept = best >= self.score_thresh
            corners = row[kept] * row.new_tensor([width, height, width, height])
            results.append({"boxes": corners, "labels": place[kept] % self.num_classes + 1, "scores": best[kept]})
        return results


class GivenMaps(nn.Module):
    """Replaces the detector's backbone, which is in `stages`, and returns the maps that come as its pixel mask."""

    def forward(self, images: Tensor, maps: list[Tensor]) -> list[tuple[Tensor, None]]:
        return [(x, None) for x in maps]


def initialise(detector: Any) -> None:
    """Initial weights: convolutions, norms and linear layers as torch initialises them, box heads zero and in float32;
    transformers expects weights to be loaded, and draws even the weights of norms around 0."""
    special = ("sampling_offsets", "attention_weights", "value_proj", "output_proj", "enc_score_head", "class_embed")
    for name, layer in detector.named_modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) or (
            isinstance(layer, nn.Linear) and not any(part in special for part in name.split("."))
        ):
            layer.reset_parameters()
    for head in (detector.model.enc_bbox_head, *detector.model.decoder.bbox_embed):
        nn.init.zeros_(head.layers[-1].weight)
        nn.init.zeros_(head.layers[-1].bias)
        in_float32(head)
