"""Dense models without what runtimes cannot take: from normalised images to what their heads say, nothing decoded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..lowering.operations import average_by_products, free

NEARLY = 1e-4  # of scores, over the largest: what rounding makes of equals in another runtime


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
