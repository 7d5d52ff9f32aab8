"""Measurements of what a model does inside. They read models and never change them."""

from .. import lazy

_PUBLIC = {
    ".inspection.attention": "find_attention watch_attention",
    ".inspection.blocks": "Block find_blocks find_layers watch_blocks",
    "front_points": "AXES Point competitor_points find_tables paper_points read_points",
    "measures": "MEASURES Measure find_measure register_measure",
    "measures.dead": "DeadNeurons LayerDeath dead_neurons plot_dead_neurons",
    "measures.entropy": "LayerEntropy attention_entropy plot_attention_entropy",
    "measures.front": "Front Fronts fronts pareto_front plot_fronts",
    "measures.interaction": "InteractionStrength interaction_strength plot_interaction_strength",
    "measures.logits": "TokenLogits plot_token_logits token_logits",
    "measures.receptive_field": "ReceptiveField effective_receptive_field plot_receptive_field",
    "measures.removal": "RemovalCurves plot_salient_removal salient_removal",
    "measures.similarity": "LayerSimilarity attention_similarity plot_attention_similarity",
    "measures.spectrum": "LayerSpectrum Spectra log_amplitude plot_spectrum",
    "measures.tokens": "GroupVotes TokenVotes plot_token_votes token_votes",
    "measures.variance": "FeatureVariance LayerVariance feature_variance plot_feature_variance",
}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
