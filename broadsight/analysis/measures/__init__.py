"""All measures by the names that users type: what each says, which models have it, how it is run and shown."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import unknown
from ...inspection.attention import find_attention
from ...inspection.passing import Seen
from .. import result_rows
from ..spectrum_chart import plot_spectrum
from .attention import attention_entropy, plot_attention_entropy
from .attention_similarity import attention_similarity, plot_attention_similarity
from .base import Measure as Measure
from .dead_neurons import dead_neurons, plot_dead_neurons
from .feature_variance import feature_variance, plot_feature_variance
from .fronts import AXES, Fronts, Point, fronts, plot_fronts
from .interaction import interaction_strength, plot_interaction_strength
from .receptive_field import effective_receptive_field, plot_receptive_field
from .salient_removal import plot_salient_removal, salient_removal
from .spectrum import Spectra, log_amplitude
from .token_logits import plot_token_logits, token_logits
from .token_votes import plot_token_votes, token_votes

ATTENTION = "attention"
TRANSFORMERS = "vit_small_patch16_224, swin_tiny_patch4_window7_224, mat_2 or stvit_small"
TOKENS = "multi-token pooling"
POOLED = "map_resnet50, map_convnext_tiny, or a run trained with --pool map"
MAPS = "blocks that give a map"
CLASSIFIER, ANY = "classifier", "resnet50, deit_small_patch16_224, mat_2 or any run that classifies"


def _by_layer(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"layers": [{"name": name, **layer.record()} for name, layer in result.items()]}


def _attends(model: nn.Module) -> bool:
    return bool(find_attention(model))


def _plot_all_layers(spectra: Mapping[str, Spectra]) -> Any:
    """Without the argument `layers`, by which `log_amplitude` means something else."""
    return plot_spectrum(spectra)


def _has_tokens(model: Any) -> bool:
    return callable(getattr(model, "forward_groups", None)) and bool(getattr(model, "has_groups", True))


def _all_token_logits(
    model: nn.Module,
    images: Any,
    *,
    classes: Sequence[int] | None = None,
    view: str = "classes",
    batch_size: int = 8,
    seen: Seen | None = None,
) -> Any:
    """`token_logits` of as many images as there are: how many, the user has said."""
    return token_logits(model, images, classes=classes, view=view, limit=sys.maxsize, batch_size=batch_size, seen=seen)


def fronts_over(points: Callable[[str], Iterable[Point]], *, x: str = "all", paper: str = "") -> dict[str, Fronts]:
    """Fronts over one cost, or over all that anything is known of.

    Args:
        points: What is known of each model, by the cost that is asked for: one of AXES.
        x: One of AXES, or "all".
        paper: For whoever makes the points.
    """
    if x != "all":
        return {x: fronts(points(x), x)}
    found, failures = {}, []
    for axis in AXES:
        try:
            found[axis] = fronts(points(axis), axis)
        except ValueError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return found


_ALL = (
    Measure(
        "variance",
        "how diverse features are: among the channels of a place, and among the places of a channel",
        "MAP, Figs. 2a-b and 7a-b",
        MAPS,
        ANY,
        feature_variance,
        plot_feature_variance,
        result_rows.variance,
        options={
            "correction": "1 for the unbiased variance, 0 for that of the values as they are",
            "relative": "draw it divided by the mean square, for models of different backbones",
        },
    ),
    Measure(
        "dead",
        "how many activations and channels never fire",
        "MAP, Figs. 2c and 7c",
        "activations such as ReLU or GELU",
        ANY,
        dead_neurons,
        plot_dead_neurons,
        result_rows.dead,
    ),
    Measure(
        "spectrum",
        "which spatial frequencies features have, layer by layer: smooth or fine",
        "EMSNet, Figs. 3.5, 3.6 and 3.10",
        MAPS,
        ANY,
        log_amplitude,
        _plot_all_layers,
        result_rows.spectrum,
        options={
            "layers": "modules to look at instead of all blocks: names or patterns",
            "floor": "added to amplitudes",
        },
    ),
    Measure(
        "entropy",
        "how widely every attention spreads: from one token, 0, to all alike",
        "context broadcasting, Sec. 3",
        ATTENTION,
        TRANSFORMERS,
        attention_entropy,
        plot_attention_entropy,
        result_rows.entropy,
        _by_layer,
        _attends,
    ),
    Measure(
        "similarity",
        "how alike attention is between queries and between heads: at 1 all ask for the same",
        "PartialFormer, Fig. 5.2",
        ATTENTION,
        TRANSFORMERS,
        attention_similarity,
        plot_attention_similarity,
        result_rows.similarity,
        _by_layer,
        _attends,
        options={"with_itself": "whether a row is a pair with itself too"},
    ),
    Measure(
        "tokens",
        "bias and variance of class tokens: how often all of them are wrong, and how often one differs from all",
        "MAP, Eq. 2 and Fig. 4",
        TOKENS,
        POOLED,
        token_votes,
        plot_token_votes,
        result_rows.tokens,
        suits=_has_tokens,
        least=2,
        labels="welcome",
        dense=False,
    ),
    Measure(
        "logits",
        "where class tokens, groups and their aggregate are among the logits",
        "MAP, Fig. 5",
        TOKENS,
        POOLED,
        _all_token_logits,
        plot_token_logits,
        result_rows.logits,
        suits=_has_tokens,
        samples=200,
        labels="welcome",
        dense=False,
        options={
            "view": "classes, whose axes are two classes' logits, or pca",
            "classes": "numbers of the two classes, such as 3,5; without them each image has its own",
        },
    ),
    Measure(
        "interaction",
        "how strongly pairs of patches act together, by how much of the image is around them",
        "EMSNet, Eq. 3.13-3.14 and Fig. 3.7",
        CLASSIFIER,
        ANY,
        interaction_strength,
        plot_interaction_strength,
        result_rows.interaction,
        samples=8,
        batch=32,
        dense=False,
        options={
            "grid": "patches down and across, such as 16,16",
            "orders": "how much is around a pair: parts of all patches, or numbers of them",
            "pairs": "drawn of each image",
            "contexts": "drawn of each pair and order",
            "target": "class whose score it is: a number, label, or without it the answer",
            "score": "log-odds or logit",
            "baseline": "what stands for an absent patch, in normalised values",
        },
    ),
    Measure(
        "receptive-field",
        "how much each pixel matters to the centre of the last map",
        "after Luo et al., 2016",
        MAPS,
        ANY,
        effective_receptive_field,
        plot_receptive_field,
        result_rows.receptive_field,
        samples=50,
        batch=8,
        options={
            "layer": "module whose map is looked at; the last block without it",
            "log": "draw it on a logarithmic scale",
        },
    ),
    Measure(
        "removal",
        "how fast the answer is lost when pixels go, the most salient first",
        "MAP, Fig. 3",
        CLASSIFIER,
        ANY,
        salient_removal,
        plot_salient_removal,
        result_rows.removal,
        samples=200,
        batch=32,
        takes="classifier",
        labels="needed",
        dense=False,
        options={
            "saliency": "scenes, gradcam, dino, or your own as file.py:function",
            "fractions": "parts of the pixels that go, such as 0,0.25,0.5",
            "dino_checkpoint": "weights of the saliency dino; timm's without",
        },
    ),
    Measure(
        "front",
        "which models are worth their cost: accuracy over latency, MACs and parameters",
        "MAP, Fig. 7d; MAT, Fig. 4.4; PartialFormer, Fig. 5.1",
        CLASSIFIER,
        ANY,
        fronts_over,
        plot_fronts,
        result_rows.front,
        batch=64,
        takes="files",
        labels="needed",
        dense=False,
        options={
            "x": "latency_ms, macs, parameters or all",
            "paper": "published accuracies too, of our models whose names match, such as 'mat_*'",
        },
    ),
)
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}


def find_measure(name: str) -> Measure:
    if name in MEASURES:
        return MEASURES[name]
    raise unknown("measure", name, MEASURES)


def suiting(model: nn.Module, dense: bool = False) -> list[str]:
    """Names of the measures that a model has what it takes for."""
    return [name for name, measure in MEASURES.items() if (measure.dense or not dense) and measure.suits(model)]


def unlabelled_measures() -> list[str]:
    """Names of the measures that need not know what images show."""
    return [name for name, measure in MEASURES.items() if measure.labels != "needed"]


def refuse_unsuited(measure: Measure, model: nn.Module, name: str, *, dense: bool = False) -> None:
    """Say that a model has not what a measure is of, what else can be measured of it, and which models have it."""
    others = [other for other in suiting(model, dense) if other != measure.name]
    what = "is a dense run, of which the backbone alone is measured" if dense and not measure.dense else ""
    raise ValueError(
        f"{name} {what or f'has no {measure.thing}'}; {measure.name} needs {measure.thing}, as in {measure.examples}; "
        f"of {name} there are {', '.join(others)}"
    )
