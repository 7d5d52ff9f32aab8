"""The command that serves a local web page: app."""

import sys
import webbrowser
from pathlib import Path
from typing import Any

from ..app.request import Request
from ..errors import printable
from ..options import TIMM_NAMES
from ..visual.terminal import note
from .parser import DONE


def app(request: Request) -> int:
    """Open the models, serve the page, and wait until somebody stops it."""
    from ..app import server

    named = [name for name in request.runs if not Path(name).is_dir()]
    request.refuse_ignored({TIMM_NAMES: None if named else "none is named"})
    server.need_gradio()
    limits: dict[str, Any] = dict(megabytes=request.max_upload, storage=request.max_storage)
    limits |= dict(host=request.host, port=request.port, allow_host=request.allow_host or "")
    server.checked(**limits)  # refused before models are opened
    import torch

    from ..app.candidates import open_candidates

    torch.set_num_threads(request.used_threads)
    given: dict[str, Any] = dict(checkpoint=request.checkpoint, pretrained=request.pretrained, device=request.device)
    candidates = open_candidates(request.runs, **given, model_args=request.model_args, size=request.size)
    for one in candidates.notes:
        note(one)
    if candidates.untrained:
        names = printable(", ".join(candidates.untrained))
        print(f"note: {names}: random weights, the answers mean nothing; `broadsight train` makes trained ones")
    if not server.is_loopback(request.host):
        print(f"warning: --host {request.host}: everybody who reaches this computer can use the page", file=sys.stderr)
    with server.serving(candidates, **limits) as address:
        print(f"{printable(', '.join(candidates.names))}: {address} (Ctrl-C stops)", flush=True)
        if request.open:
            webbrowser.open(address)
        server.wait()
    print("stopped")
    return DONE
