"""What a user asks of `convert`."""

from dataclasses import dataclass

from ..options import Options, option


@dataclass(frozen=True)
class Request(Options):
    """Rewrite a pickled checkpoint as safetensors, without executing anything in it."""

    verb = "convert"

    source: str = option(
        ..., "checkpoint as its authors released it, such as a .pth.tar file", positional=True, metavar="SOURCE"
    )
    target: str = option(..., "safetensors file to write", positional=True, metavar="TARGET")
    overwrite: bool = option(False, "replace a TARGET that exists")
