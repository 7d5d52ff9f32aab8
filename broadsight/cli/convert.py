"""The command that rewrites checkpoints as safetensors: convert."""

from typing import Annotated

from ..errors import UsageError
from .parser import DONE, Arg
from .terminal import check_writable


def convert(
    source: Annotated[str, Arg("checkpoint as its authors released it, such as a .pth.tar file", True, "SOURCE")],
    target: Annotated[str, Arg("safetensors file to write", True, "TARGET")],
    overwrite: Annotated[bool, Arg("replace a TARGET that exists")] = False,
) -> int:
    """Rewrite a pickled checkpoint as safetensors, without executing anything in it."""
    check_writable(target)
    from ..weights.released_stvit import contents, convert_release

    try:
        written = convert_release(source, target, overwrite=overwrite)
    except FileExistsError as error:
        raise UsageError(str(error).replace("overwrite=True", "--overwrite")) from None
    names, metadata = contents(written)
    left_out = f"; left out: {metadata['left_out']}" if "left_out" in metadata else ""
    print(f"{written}: {len(names)} tensors, {written.stat().st_size:,} bytes{left_out}")
    return DONE
