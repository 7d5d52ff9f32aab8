"""Building blocks: tensors in and out, one idea a file."""

from .abstract_token import AbstractTokenAttention as AbstractTokenAttention
from .bilinear_embed import BilinearPatchEmbed as BilinearPatchEmbed
from .channel_mlp import ChannelMlp as ChannelMlp
from .depthwise import DepthwiseConv as DepthwiseConv
from .ems import CMHSA as CMHSA
from .ems import GMHSA as GMHSA
from .ems import MultiScaleInteraction as MultiScaleInteraction
from .partial_attention import PartialAttention as PartialAttention
from .relative_position import RelativePositionBias as RelativePositionBias
from .super_token import SuperTokenAttention as SuperTokenAttention
