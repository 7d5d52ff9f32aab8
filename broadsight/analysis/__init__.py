"""Measurements of what a network does inside. They read models and never change them."""

from .attention import LayerEntropy as LayerEntropy
from .attention import attention_entropy as attention_entropy
from .attention import plot_attention_entropy as plot_attention_entropy
