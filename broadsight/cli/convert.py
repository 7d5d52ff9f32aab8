"""The command that rewrites checkpoints as safetensors: convert."""

from ..errors import UsageError
from ..files import check_writable
from ..weights.request import Request
from .parser import DONE


def convert(request: Request) -> int:
    """Convert, and say what was written."""
    check_writable(request.target)
    from ..weights.released_stvit import contents, convert_release

    try:
        written = convert_release(request.source, request.target, overwrite=request.overwrite)
    except FileExistsError as error:
        raise UsageError(str(error).replace("overwrite=True", "--overwrite")) from None
    names, metadata = contents(written)
    left_out = f"; left out: {metadata['left_out']}" if "left_out" in metadata else ""
    print(f"{written}: {len(names)} tensors, {written.stat().st_size:,} bytes{left_out}")
    return DONE
