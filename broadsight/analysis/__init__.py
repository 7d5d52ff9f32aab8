"""Measurements of what a model does inside. They read models and never change them."""

from .. import lazy

_MODULES = {
    ".inspection.attention": ("find_attention", "watch_attention"),
    ".inspection.blocks": ("Block", "find_blocks", "find_layers", "watch_blocks"),
    "measures": ("MEASURES", "find_measure"),
    "measures.attention": ("LayerEntropy", "attention_entropy", "plot_attention_entropy"),
    "measures.attention_similarity": ("LayerSimilarity", "attention_similarity", "plot_attention_similarity"),
    "measures.base": ("Measure",),
    "measures.dead_neurons": ("DeadNeurons", "LayerDeath", "dead_neurons", "plot_dead_neurons"),
    "measures.feature_variance": ("FeatureVariance", "LayerVariance", "feature_variance", "plot_feature_variance"),
    "measures.fronts": (
        "AXES",
        "Front",
        "Fronts",
        "Point",
        "fronts",
        "paper_points",
        "pareto_front",
        "plot_fronts",
        "read_points",
    ),
    "measures.interaction": (
        "InteractionStrength",
        "interaction_strength",
        "passes_per_image",
        "plot_interaction_strength",
    ),
    "measures.receptive_field": ("ReceptiveField", "effective_receptive_field", "plot_receptive_field"),
    "measures.salient_removal": ("RemovalCurves", "plot_salient_removal", "salient_removal"),
    "measures.spectrum": ("LayerSpectrum", "Spectra", "log_amplitude"),
    "measures.token_logits": ("TokenLogits", "plot_token_logits", "token_logits"),
    "measures.token_votes": ("GroupVotes", "TokenVotes", "plot_token_votes", "token_votes"),
    "spectrum_chart": ("plot_amplitude_spectrum", "plot_log_amplitude", "plot_spectrum"),
}

__getattr__, __dir__ = lazy(__name__, {name: module for module, names in _MODULES.items() for name in names})
