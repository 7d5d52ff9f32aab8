"""The registered models, one paper a file. Importing this package registers them with timm."""

from importlib import import_module
from pkgutil import iter_modules

from .emsnet import EMSNet as EMSNet
from .mat import MAT as MAT
from .partialformer import PartialFormer as PartialFormer
from .stvit import STViT as STViT

# The files that register models under names of their own; `edited` stands for any model.
FAMILIES = tuple(
    file.name
    for file in iter_modules(__path__)
    if hasattr(import_module(f"{__name__}.{file.name}"), "default_cfgs") and file.name != "edited"
)
