"""Building blocks: tensors in and out, one idea a file."""

from .abstract_token import AbstractTokenAttention as AbstractTokenAttention
from .bilinear_embed import BilinearPatchEmbed as BilinearPatchEmbed
from .channel_mlp import ChannelMlp as ChannelMlp
from .class_attention import GroupClassAttention as GroupClassAttention
from .context_broadcast import ContextBroadcast as ContextBroadcast
from .depthwise import DepthwiseConv as DepthwiseConv
from .ems import CMHSA as CMHSA
from .ems import GMHSA as GMHSA
from .ems import MultiScaleInteraction as MultiScaleInteraction
from .gram_tokens import GramTokens as GramTokens
from .merge_maps import MergeMaps as MergeMaps
from .multi_token_neck import MultiTokenNeck as MultiTokenNeck
from .multi_token_pool import GroupLogits as GroupLogits
from .multi_token_pool import MultiTokenPool as MultiTokenPool
from .partial_attention import PartialAttention as PartialAttention
from .plain_pools import AveragePool as AveragePool
from .plain_pools import FlattenPool as FlattenPool
from .plain_pools import FourierPool as FourierPool
from .relative_position import RelativePositionBias as RelativePositionBias
from .super_token import SuperTokenAttention as SuperTokenAttention
