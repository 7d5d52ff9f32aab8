"""The command that serves a local web page: app."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from .parser import (
    DONE,
    TIMM_NAMES,
    Arg,
    Checkpoint,
    Device,
    ModelArgs,
    Pretrained,
    Size,
    Threads,
    check_options,
    register_models,
    value_of,
)
from .terminal import printable


def app(
    runs: Annotated[
        list[str] | None,
        Arg("folders of runs and timm names; without any, the newest runs in ./runs", True, "RUN|MODEL"),
    ] = None,
    host: Annotated[str, Arg("address to listen on; others than 127.0.0.1 let other machines in")] = "127.0.0.1",
    port: Annotated[int | None, Arg("port to listen on; without it 7860, or the next that is free")] = None,
    open: Annotated[bool, Arg("open the page in the browser")] = False,
    max_upload: Annotated[float, Arg("the most that an uploaded image may have, in MB", metavar="MB")] = 20.0,
    max_storage: Annotated[
        float | None,
        Arg("the most that all uploads and answers may take, in MB; the oldest go first (default: 500)", metavar="MB"),
    ] = None,
    allow_host: Annotated[
        str | None,
        Arg("names, separated by commas, that the page answers to beside those of this computer", metavar="NAME,..."),
    ] = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Serve a local web page: ask models about images, look inside them, compare them."""
    given = dict(locals())
    from ..app import server

    named = [name for name in runs or [] if not Path(name).is_dir()]
    check_options(app, given, {TIMM_NAMES: None if named else "none is named"})
    server.need_gradio()
    server.free_port(host, port)  # refused before models are opened
    server.check_megabytes(max_upload)
    server.check_storage(max_storage, max_upload)
    server.allowed_names(allow_host or "")
    register_models()
    import torch

    from ..app.candidates import open_candidates
    from ..prediction.classification import check_counts
    from ..training.recipes import assignments

    check_counts(threads=threads)
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1)
    candidates = open_candidates(
        runs or [],
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        device=device,
    )
    for note in candidates.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if candidates.untrained:
        names = printable(", ".join(candidates.untrained))
        print(f"note: {names}: random weights, the answers mean nothing; `broadsight train` makes trained ones")
    if not server.is_loopback(host):
        print(f"warning: --host {host}: everybody who reaches this computer can use the page", file=sys.stderr)
    with server.serving(
        candidates, host=host, port=port, megabytes=max_upload, storage=max_storage, allow_host=allow_host or ""
    ) as address:
        print(f"{printable(', '.join(candidates.names))}: {address} (Ctrl-C stops)", flush=True)
        if open:
            webbrowser.open(address)
        server.wait()
    print("stopped")
    return DONE
