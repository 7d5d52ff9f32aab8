"""Measurements of what a model does inside. They read models and never change them."""
# ruff: noqa: F401 (the public names)

from ..inspection.attention import find_attention, watch_attention
from ..inspection.blocks import Block, find_blocks, find_layers, watch_blocks
from .front_points import AXES, Point, paper_points, read_points
from .measures import MEASURES, Measure, find_measure, register_measure
from .measures.dead import DeadNeurons, LayerDeath, dead_neurons, plot_dead_neurons
from .measures.entropy import LayerEntropy, attention_entropy, plot_attention_entropy
from .measures.front import Front, Fronts, fronts, pareto_front, plot_fronts
from .measures.interaction import InteractionStrength, interaction_strength, passes_per_image, plot_interaction_strength
from .measures.logits import TokenLogits, plot_token_logits, token_logits
from .measures.receptive_field import ReceptiveField, effective_receptive_field, plot_receptive_field
from .measures.removal import RemovalCurves, plot_salient_removal, salient_removal
from .measures.similarity import LayerSimilarity, attention_similarity, plot_attention_similarity
from .measures.spectrum import (
    LayerSpectrum,
    Spectra,
    log_amplitude,
    plot_amplitude_spectrum,
    plot_log_amplitude,
    plot_spectrum,
)
from .measures.tokens import GroupVotes, TokenVotes, plot_token_votes, token_votes
from .measures.variance import FeatureVariance, LayerVariance, feature_variance, plot_feature_variance
