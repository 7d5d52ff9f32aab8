"""A dense run as a model that runtimes take, and in words what stands before and behind it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...runs.dense_model import DenseModel
from ...training.dense import crop_size
from ..lowering.operations import average_by_products, free

NEARLY = 1e-4  # of scores, over the largest: what rounding makes of equals in another runtime
CELL = 32  # pixels of the coarsest map of all backbones
BOXES = ("cls_logits", "bbox_regression")
PADDING = 1.25  # of a crop around a box; as pose models are trained
WANTS_REGIONS = ("faster_rcnn", "mask_rcnn", "cascade_mask_rcnn", "keypoint_rcnn")
WITHOUT_REGIONS = {
    "instances": "no head for masks does without; train semantic_fpn or upernet for classes of pixels",
    "keypoints": "train simple_baseline, which finds keypoints in boxes",
}
Said = dict[str, Any]  # as JSON can hold it


class NotExportable(ValueError):
    """A model that no runtime takes; the message says which one to train instead."""


@dataclass(frozen=True)
class RawModel:
    """A dense model up to its heads."""

    model: nn.Module  # (B, C, H, W), normalised -> a tuple of tensors; a copy, in eval mode on the CPU
    outputs: tuple[str, ...]  # their names
    size: tuple[int, int]  # (height, width) of the images that it is exported for if these are fixed
    any_size: bool  # whether height and width can be left open
    preprocessing: Said  # how an image becomes the model's input; see `session`
    decoding: Said  # how outputs become findings; see `decoding`


def check_exportable(head: str, task: str) -> None:
    """Refuse heads that no runtime takes, before anything is opened: those that look into regions of their choice."""
    known = f"heads that export are {', '.join(HEADS)}"
    if head in WANTS_REGIONS:
        why = "looks into regions of its own choice, as many as it finds, which exported graphs cannot"
        instead = WITHOUT_REGIONS.get(task, "train retinanet, fcos, ssdlite or rtdetr")
        raise NotExportable(f"{head} {why}; {instead}; {known}")
    if head not in HEADS:
        raise NotExportable(f"{head} has no export; {known}")


def raw_model(run: DenseModel, *, canvas: tuple[int, int] | None = None) -> RawModel:
    """The part of a dense model that runtimes execute: without decoding and suppression of boxes, whose shapes depend
    on what was found. canvas: (height, width) that images are fitted into if sizes are not left open."""
    check_exportable(run.head, run.task)
    model = deepcopy(run.model).cpu().float().eval().requires_grad_(False)
    found = HEADS[run.head](run, model)
    if canvas is not None:
        shown = f"canvas={canvas[0]}x{canvas[1]}"
        if found.preprocessing["way"] != "fit" and canvas != found.size:
            raise ValueError(f"{shown}; {run.head} takes {found.size[0]}x{found.size[1]} alone")
        near = [max(CELL, CELL * round(side / CELL)) for side in canvas]
        if found.preprocessing["way"] == "fit" and near != [*canvas]:
            raise ValueError(f"{shown}; expected multiples of {CELL}, for instance {near[0]}x{near[1]}")
        found = replace(found, size=canvas)
    said = {"mean": [float(x) for x in model.stages.mean], "std": [float(x) for x in model.stages.std]}
    ids = [run.category_ids[label] for label in sorted(run.category_ids)]  # of COCO, in the order of the labels
    decoding = {"head": run.head, **found.decoding, **({"category_ids": ids} if ids else {})}
    return replace(found, model=found.model.eval(), preprocessing=found.preprocessing | said, decoding=decoding)


def _dense_anchors(run: DenseModel, model: Any) -> RawModel:
    """RetinaNet and FCOS: images keep their aspect and are padded; anchors are of known strides."""
    generator = model.anchor_generator
    generator.set_cell_anchors(torch.float32, torch.device("cpu"))
    each = zip(generator.strides, generator.cell_anchors, strict=True)
    levels = [{"stride": stride, "step": [stride, stride], "boxes": boxes.tolist()} for stride, boxes in each]
    centered = hasattr(model.head.regression_head, "bbox_ctrness")
    outputs = (*BOXES, "bbox_ctrness") if centered else BOXES
    decoding = _of_anchors(model, "sigmoid", levels, generator.offset, None if run.head == "fcos" else model.box_coder)
    short, long = model.transform.image_size or (None, None)
    said = dict(short_side=short, long_side=long, rounding="down", antialias=False)
    said["multiple"] = model.transform.size_divisible
    return _fitting(model, RawDetector(model, outputs), outputs, said, decoding, long)


def _default_boxes(run: DenseModel, model: Any) -> RawModel:
    """SSDLite: every image is resized to one size, and boxes are shares of it."""
    height, width = model.transform.image_size
    levels = []
    for level, pairs in enumerate(model.anchor_generator._wh_pairs):
        stride = model.stages.strides[-2] * 2**level
        grid = -(-height // stride), -(-width // stride)
        sides = pairs.clamp(0, 1).double() * torch.tensor([width, height])
        boxes = torch.cat([-sides / 2, sides / 2], 1).tolist()
        levels.append({"stride": stride, "step": [height / grid[0], width / grid[1]], "boxes": boxes})
    decoding = _of_anchors(model, "softmax", levels, 0.5, model.box_coder)
    preprocessing = {"way": "exact", "antialias": False}
    return RawModel(RawDetector(model, BOXES), BOXES, (height, width), False, preprocessing, decoding)


def _of_anchors(model: Any, scores: str, levels: list[Said], offset: float, coder: Any) -> Said:
    """How boxes come from anchors and are suppressed. coder: of boxes as deltas; None where they are distances."""
    boxes: Said = {"coder": "distances", "weights": None, "largest_growth": None}
    if coder is not None:
        boxes = {"coder": "deltas", "weights": list(coder.weights), "largest_growth": coder.bbox_xform_clip}
    limits = dict(score_threshold=model.score_thresh, candidates=model.topk_candidates, overlap=model.nms_thresh)
    said = dict(kind="anchors", scores=scores, offset=offset, levels=levels, classes=model.num_classes)
    return boxes | said | limits | {"detections": model.detections_per_img}


def _queries(run: DenseModel, model: Any) -> RawModel:
    """RT-DETR, which suppresses nothing."""
    decoding = {"kind": "queries", "classes": model.num_classes, "detections": model.detections_per_img}
    decoding["score_threshold"] = model.score_thresh
    outputs, preprocessing = ("logits", "boxes", "chosen"), {"way": "exact", "antialias": True}
    return RawModel(RawQueries(model), outputs, model.image_size, False, preprocessing, decoding)


def _pixels(run: DenseModel, model: Any) -> RawModel:
    """Segmenters: images keep their aspect."""
    views = run.views()
    decoding = {"kind": "pixels", "classes": model.num_classes, "stride": model.stages.strides[0]}
    said = dict(short_side=views.short_side, long_side=views.long_side, rounding="nearest", antialias=True, multiple=1)
    return _fitting(model, RawSegmenter(model), ("logits",), said, decoding, views.short_side)


def _fitting(model: Any, inner: nn.Module, outputs: Any, said: Said, decoding: Said, canvas: int | None) -> RawModel:
    """For images that keep their aspect: the shorter side gets "short_side" pixels unless the longer would exceed
    "long_side"; on a square of at least `canvas`, or padded to a "multiple" where sizes are open."""
    side = -(-(canvas or 640) // CELL) * CELL
    # A backbone of one size alone has every image resized inside, which is no graph for all sizes
    return RawModel(inner, outputs, (side, side), model.stages.fixed_size is None, {"way": "fit", **said}, decoding)


def _heat_maps(run: DenseModel, model: Any) -> RawModel:
    """Pose models: crops around boxes that something else has found."""
    model.normalise = nn.Identity()
    decoding = dict(kind="heatmaps", stride=model.stride, names=list(run.keypoint_names))
    decoding["skeleton"] = [list(pair) for pair in run.skeleton]
    decoding["keypoint_offset"] = run.keypoint_offset  # what COCO's result files have less of x and y
    preprocessing = {"way": "crops", "padding": PADDING}
    return RawModel(AsTuple(model), ("heatmaps",), crop_size(run.recipe), False, preprocessing, decoding)


HEADS = dict(retinanet=_dense_anchors, fcos=_dense_anchors, ssdlite=_default_boxes, rtdetr=_queries)
HEADS |= dict(semantic_fpn=_pixels, upernet=_pixels, simple_baseline=_heat_maps)


class Copying(TorchFunctionMode):
    """In programs for any size, what might do without a copy makes one: whether it could may depend on a map having but
    one cell, or a batch one image; torch would answer for the example and have the program refuse what differs."""

    might = frozenset({Tensor.reshape, Tensor.contiguous, Tensor.flatten, torch.reshape, torch.flatten})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.might and free(*args[0].shape):
            args = (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
        return func(*args, **(kwargs or {}))


class RawDetector(nn.Module):
    """RetinaNet, FCOS or SSDLite: (B, C, H, W), normalised, -> some of what its head gives: class logits (B, A, K),
    boxes (B, A, 4), of some centerness."""

    def __init__(self, model: Any, outputs: tuple[str, ...]):
        super().__init__()
        self.backbone, self.head, self.outputs = model.backbone, model.head, outputs
        replace_layers(self.head, nn.Conv2d, lambda one: SingleChannel(one) if one.out_channels == 1 else one)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        with Copying():
            found = self.head(list(self.backbone(images).values()))
        return tuple(found[name] for name in self.outputs)


class SingleChannel(nn.Module):
    """A convolution to one channel, computed twice in programs for any size, since of a map of one channel torch asks
    whether it has one cell as well."""

    def __init__(self, convolution: nn.Conv2d):
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        one = self.convolution
        if not free(*x.shape):
            return one(x)
        both = one._conv_forward(x, one.weight.repeat(2, 1, 1, 1), None if one.bias is None else one.bias.repeat(2))
        return both[:, :1].clone(memory_format=torch.contiguous_format)


class RawQueries(nn.Module):
    """RT-DETR: (B, C, H, W) of its one size, normalised, -> logits (B, Q, K), boxes (B, Q, 4) as shares of the sides,
    and the positions (B, Q) that queries began from: of near equal scores another runtime may choose others, and only
    `following` its choice can one tell whether it computes the same. transformers' own way through these layers fixes
    the number of images in a program, and makes anchors anew each time. The model's decoder is changed."""

    anchors: Tensor
    valid: Tensor

    def __init__(self, model: Any):
        super().__init__()
        inner = model.detector.model
        self.stages, self.queries = model.stages, inner.config.num_queries
        self.into_encoder, self.into_decoder = inner.encoder_input_proj, inner.decoder_input_proj
        self.encoder, self.decoder = inner.encoder, inner.decoder
        self.proposal = inner.enc_output
        self.proposal_scores, self.proposal_boxes = inner.enc_score_head, inner.enc_bbox_head
        self.scores = inner.decoder.class_embed[-1]
        inner.decoder.class_embed = None  # what earlier layers say is for training
        strides = model.stages.strides[-len(self.into_encoder) :]
        self.grids = tuple((model.image_size[0] // stride, model.image_size[1] // stride) for stride in strides)
        anchors, valid = inner.generate_anchors(self.grids)
        self.register_buffer("anchors", anchors, persistent=False)  # 1 N 4, before the sigmoid
        self.register_buffer("valid", valid.to(anchors.dtype), persistent=False)  # 1 N 1
        sides = torch.tensor(self.grids)
        self.register_buffer("sides", sides, persistent=False)
        self.register_buffer("starts", torch.cat([sides.new_zeros(1), sides.prod(1).cumsum(0)[:-1]]), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, proposals, scores = self.propose(images)
        chosen = scores.topk(self.queries, dim=1).indices
        return (*self.decide(tokens, proposals, chosen), chosen)

    def following(self, images: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The answer for positions (B, Q) that another has chosen, if these are as good; else for its own."""
        tokens, proposals, scores = self.propose(images)
        if not as_good(scores, chosen, self.queries):
            chosen = scores.topk(self.queries, dim=1).indices
        return (*self.decide(tokens, proposals, chosen.long()), chosen)

    def propose(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is seen at all positions (B, N, C), what is proposed there (B, N, C), and how that scores (B, N)."""
        maps = self.stages(images)[-len(self.grids) :]
        maps = [layer(x) for layer, x in zip(self.into_encoder, maps, strict=True)]
        maps = self.encoder(maps).last_hidden_state
        tokens = torch.cat([layer(x).flatten(2).mT for layer, x in zip(self.into_decoder, maps, strict=True)], 1)
        proposals = self.proposal(self.valid * tokens)
        return tokens, proposals, self.proposal_scores(proposals).amax(-1)

    def decide(self, tokens: Tensor, proposals: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and boxes of the queries that begin from these positions (B, Q)."""
        best, boxes = chosen[..., None], self.proposal_boxes(proposals) + self.anchors
        embeds = proposals.gather(1, best.expand(-1, -1, proposals.shape[-1]))
        points = boxes.gather(1, best.expand(-1, -1, 4))
        maps = dict(spatial_shapes=self.sides, spatial_shapes_list=list(self.grids), level_start_index=self.starts)
        found = self.decoder(inputs_embeds=embeds, encoder_hidden_states=tokens, reference_points=points, **maps)
        return self.scores(found.last_hidden_state), found.intermediate_reference_points[:, -1]


def as_good(scores: Tensor, chosen: Tensor, count: int) -> bool:
    """Whether positions (B, count) are those of the best scores (B, N), each once, the best first, up to rounding."""
    if chosen.shape != (len(scores), count) or chosen.min() < 0 or chosen.max() >= scores.shape[1]:
        return False
    once = bool((chosen.sort(1).values.diff(dim=1) > 0).all())
    far = (scores.gather(1, chosen.long()) - scores.topk(count, dim=1).values).abs().max()
    return once and bool(far <= NEARLY * scores.abs().max())


class RawSegmenter(nn.Module):
    """(B, C, H, W), normalised, -> logits (B, K, ceil(H / 4), ceil(W / 4)) of the classes; decoding enlarges, crops and
    resizes them to the image by one matrix for the rows and one for the columns."""

    def __init__(self, model: Any):
        super().__init__()
        self.stages, self.decoder, self.classifier = model.stages, model.decoder, model.classifier
        replace_layers(self.decoder, nn.AdaptiveAvgPool2d, lambda pool: PoolToCells(pool.output_size))

    def forward(self, images: Tensor) -> tuple[Tensor]:
        with Copying():
            return (self.classifier(self.decoder(self.stages(images))),)


class PoolToCells(nn.Module):
    """nn.AdaptiveAvgPool2d as two products, (B, C, H, W) -> (B, C, cells, cells); of it exporters make gathers."""

    def __init__(self, cells: int):
        super().__init__()
        self.cells = int(cells)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True) if self.cells == 1 else average_by_products(x, self.cells, self.cells)


def replace_layers(model: nn.Module, kind: type, make: Callable[[Any], nn.Module]) -> None:
    """Put in the place of each layer of a kind what is made of it, which may be the same."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, kind):
                setattr(module, name, make(child))


class AsTuple(nn.Module):
    """A model of one output, as those of several."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor]:
        return (self.model(images),)
