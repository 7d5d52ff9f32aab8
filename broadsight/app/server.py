"""The server of the page, on this computer, until it is stopped."""

import atexit
import errno
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .candidates import Candidates
from .door import Door
from .gate import allowed_names
from .uploads import MOST_MEGABYTES, Storage

PORT, TRIES = 7860, 100
STORAGE = 500.0  # MB of all uploads and answers
VISITORS = 200  # whose state is kept
TEMPORARY = "GRADIO_TEMP_DIR"


def need_gradio() -> None:
    """Import Gradio, or raise an ImportError of one line. Gradio reads its settings when it is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise ImportError('the page needs gradio; run: pip install "broadsight[demo]"') from None


@contextmanager
def serving(
    candidates: Candidates,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    megabytes: float = MOST_MEGABYTES,
    storage: float | None = None,
    allow_host: str = "",
) -> Generator[str, None, None]:
    """Serve the page while the `with` lasts; gives its address. Uploads are removed afterwards.

    Args:
        port: None: 7860, or the next that is free.
        megabytes: The most that an upload may have.
        storage: The most MB that all uploads and answers may take; None: STORAGE, or five of the largest uploads.
        allow_host: Names that the page answers to beside this computer's own, separated by commas.
    """
    port, room, allowed = checked(host, port, megabytes, storage, allow_host)
    folder = Path(tempfile.mkdtemp(prefix="broadsight-app-")).resolve()

    def remove() -> None:
        with candidates.computing:  # an answer that is still computed must not be written
            shutil.rmtree(folder, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # threads of Gradio's may have made it again

    with ExitStack() as closing:
        closing.callback(remove)
        closing.callback(_put_uploads_into, os.environ.get(TEMPORARY))
        _put_uploads_into(str(folder))
        need_gradio()
        from .app import build
        from .connections import Patience, ThreadServer, config_of

        blocks, most = build(candidates, folder, megabytes), int(megabytes * 2**20)
        closing.callback(blocks.close, verbose=False)
        kept = Storage(folder, int(room * 2**20))
        door = Door(_page(blocks, most), kept, most_bytes=most, allowed=allowed)
        options: dict[str, Any] = dict(log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        server = ThreadServer(config_of(door, Patience(), **options))
        closing.callback(server.stop)
        server.start([_listening(host, port)])
        name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        yield f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def checked(
    host: str, port: int | None, megabytes: float, storage: float | None, allow_host: str
) -> tuple[int, float, frozenset[str]]:
    """The port, MB that all uploads and answers may take together, and other names; a ValueError for what cannot be."""
    port = free_port(host, port)
    if not 0 < megabytes <= 1000:
        raise ValueError(f"--max-upload {megabytes:g}; expected MB, more than 0 and at most 1000")
    if storage is None:
        storage = max(STORAGE, 5 * megabytes)
    elif not megabytes + 1 <= storage <= 1_000_000:
        what = f"--max-storage {storage:g}; expected MB, at least {megabytes + 1:g}"
        raise ValueError(f"{what} (one upload and the samples)")
    return port, storage, allowed_names(allow_host)


def _put_uploads_into(folder: str | None) -> None:
    """Tell Gradio where to put uploads; None leaves it to Gradio."""
    os.environ.pop(TEMPORARY, None)
    os.environ.update({TEMPORARY: folder} if folder else {})


def _page(blocks: Any, most_bytes: int) -> Any:
    """The page as an ASGI application, to stand behind the door; Gradio's `launch` would answer other sites."""
    import gradio
    from fastapi import FastAPI

    from .app import look_of_page

    blocks.state_session_capacity = VISITORS
    quiet: dict[str, Any] = dict(docs_url=None, redoc_url=None, openapi_url=None)
    off = dict.fromkeys(("show_error", "ssr_mode", "pwa", "mcp_server", "enable_monitoring", "run_history"), False)
    options: dict[str, Any] = dict(path="/", max_file_size=most_bytes, footer_links=[], app_kwargs=dict(quiet))
    return gradio.mount_gradio_app(FastAPI(**quiet), blocks, **options, **off, **look_of_page())


def _listening(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def free_port(host: str, port: int | None) -> int:
    """The port that was asked for, or else the first free one from 7860 on; a ValueError if it is not free."""
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"--port {port}; expected 1 to 65535")
    for number in [port] if port is not None else range(PORT, PORT + TRIES):
        try:
            _listening(host, number).close()
            return number
        except PermissionError:
            raise ValueError(f"--port {number} may not be used by this user; choose one above 1023") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                advice = "use 127.0.0.1, or 0.0.0.0 for all of them"
                raise ValueError(f"--host {host} is no address of this computer; {advice}") from None
    what = f"--port {port} is taken" if port is not None else f"all ports from {PORT} on are taken"
    raise ValueError(f"{what}; choose another --port")


def is_loopback(host: str) -> bool:
    return host.lower() in ("localhost", "::1") or host.startswith("127.")


def wait() -> None:
    """Wait until Ctrl-C, or until the system asks the process to end. A second Ctrl-C ends it at once."""
    stopped = threading.Event()

    def stop(number: int, _: Any) -> None:
        stopped.set()
        signal.signal(number, signal.SIG_DFL)

    # a shell may have told us to ignore them
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped.wait(0.5):  # a wait without an end would not be interrupted on Windows
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
