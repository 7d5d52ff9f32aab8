"""Building blocks: tensors in and out, one idea a file."""

from .abstract_token import AbstractTokenAttention as AbstractTokenAttention
from .bilinear_embed import BilinearPatchEmbed as BilinearPatchEmbed
from .channel_mlp import ChannelMlp as ChannelMlp
from .coarse_attention import CMHSA as CMHSA
from .coarse_attention import GMHSA as GMHSA
from .context_broadcast import ContextBroadcast as ContextBroadcast
from .ems import MultiScaleInteraction as MultiScaleInteraction
from .partial_attention import PartialAttention as PartialAttention
from .patches import DepthwiseConv as DepthwiseConv
from .pooling.class_attention import GroupClassAttention as GroupClassAttention
from .pooling.gram_tokens import GramTokens as GramTokens
from .pooling.merge_maps import MergeMaps as MergeMaps
from .pooling.multi_token_pool import GroupLogits as GroupLogits
from .pooling.multi_token_pool import MultiTokenPool as MultiTokenPool
from .pooling.neck import MultiTokenNeck as MultiTokenNeck
from .pooling.neck import PoolNeck as PoolNeck
from .pooling.plain_pools import AveragePool as AveragePool
from .pooling.plain_pools import FlattenPool as FlattenPool
from .pooling.plain_pools import FourierPool as FourierPool
from .super_token import RelativePositionBias as RelativePositionBias
from .super_token import SuperTokenAttention as SuperTokenAttention
