"""What a user asks of `app`."""

from dataclasses import dataclass

from ..options import Computing, ModelOptions, option


@dataclass(frozen=True)
class Request(ModelOptions, Computing):
    """Serve a local web page: ask models about images, look inside them, compare them."""

    verb = "app"

    runs: tuple[str, ...] = option(
        (), "folders of runs and timm names; none: the newest runs in ./runs", positional=True, metavar="RUN|MODEL"
    )
    host: str = option("127.0.0.1", "address to listen on; others than 127.0.0.1 let other machines in")
    port: int | None = option(None, "port to listen on; without it 7860, or the next that is free")
    open: bool = option(False, "open the page in the browser")
    max_upload: float = option(20.0, "the most that an uploaded image may have, in MB", metavar="MB")
    max_storage: float | None = option(
        None, "the most that all uploads and answers may take, in MB; the oldest go first (default: 500)", metavar="MB"
    )
    allow_host: str | None = option(
        None, "names, separated by commas, that the page answers to beside those of this computer", metavar="NAME,..."
    )
