"""The registered models, one paper a file. Importing this package registers them with timm."""

from . import context_broadcast as context_broadcast
from . import edited as edited
from . import map as map
from .emsnet import EMSNet as EMSNet
from .mat import MAT as MAT
from .partialformer import PartialFormer as PartialFormer
from .stvit import STViT as STViT

FAMILIES = ("stvit", "emsnet", "mat", "partialformer", "map", "context_broadcast")
