"""What can be chosen, on the command line or in the environment, and within which bounds."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

from broadsight.app.gate import allowed_names

PREFIX = "BROADSIGHT_SERVE_"  # of a variable of the environment, as in BROADSIGHT_SERVE_MAX_BATCH=32


def _option(default: Any, help: str, least: float | None = None, most: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True)
class Options:
    """Of the service; each is an option of the command line."""

    model: str
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 lets others in")
    port: int = _option(8000, "0: one that is free", 0, 65535)
    max_batch: int = _option(16, "images that go through the model together", 1, 4096)
    max_wait_ms: float = _option(5.0, "the most that an image waits for others", 0, 10_000)
    max_megabytes: float = _option(10.0, "of an upload", 0.001, 1000)
    max_megapixels: float = _option(40.0, "of an image", 0.0001, 178)  # beyond, PIL refuses by itself
    max_waiting: int = _option(128, "requests that are here at once; more are sent away with 503", 1, 100_000)
    max_total_megabytes: float = _option(256.0, "of all uploads that are here at once", 0.001, 100_000)
    max_connections: int = _option(512, "connections that are open at once", 1, 100_000)
    timeout: float = _option(30.0, "seconds from the first byte of a request to its answer", 0.1, 3600)
    head_timeout: float = _option(10.0, "seconds that the headers of a request may take", 0.1, 3600)
    allow_host: str = _option("", "names that it answers to beside this computer's own, separated by commas")
    threads: int = _option(1, "of the model", 1, 1024)
    decoders: int = _option(2, "threads that unpack images", 1, 256)

    def __post_init__(self) -> None:
        for one in fields(self):
            least, most, value = one.metadata.get("least"), one.metadata.get("most"), getattr(self, one.name)
            if least is not None and not least <= value <= most:
                raise ValueError(f"{flag(one.name)} {value}; expected {least:g} to {most:g}")
        if self.max_total_megabytes < self.max_megabytes:
            given = f"--max-total-megabytes {self.max_total_megabytes:g}"
            raise ValueError(f"{given}; expected at least --max-megabytes, which is {self.max_megabytes:g}")
        allowed_names(self.allow_host)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parse(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Options:
    """Options of a command line; what it does not say is looked for in the environment. Leaves with 2 if wrong."""
    parser = Parser(
        prog="service.py",
        allow_abbrev=False,
        description="Serves an exported classifier over HTTP.",
        epilog=f"Each option may also be a variable of the environment, such as {PREFIX}MAX_BATCH=32.",
    )
    parser.add_argument("model", nargs="?", help="file that `broadsight export` wrote: .onnx, .xml, .pt2 or .pte")
    kinds: dict[str, type] = {}
    for one in fields(Options):
        if one.default is not MISSING:
            kinds[one.name] = type(one.default)
            about = f"{one.metadata['help']} (default: {one.default})"
            parser.add_argument(flag(one.name), type=kinds[one.name], metavar=kinds[one.name].__name__, help=about)
    said = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    for name, text in ((one.name, environment.get(PREFIX + one.name.upper())) for one in fields(Options)):
        if name not in said and text:
            try:
                said[name] = kinds.get(name, str)(text)
            except ValueError:
                parser.error(f"{PREFIX}{name.upper()}={text}; expected {kinds[name].__name__}")
    if "model" not in said:
        parser.error("there is no model; give the file that `broadsight export` wrote")
    try:
        return Options(**said)
    except ValueError as error:
        parser.error(str(error))
