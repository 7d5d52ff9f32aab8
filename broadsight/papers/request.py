"""What a user asks of `models` and `verify`."""

from dataclasses import dataclass

from ..options import Options, option


@dataclass(frozen=True)
class ModelsRequest(Options):
    """List models with parameters, MACs and published accuracy."""

    verb = "models"

    pattern: str | None = option(None, "name or wildcard such as 'stvit_*'", positional=True, metavar="PATTERN")
    json: bool = option(False, "print JSON")
    all: bool = option(False, "search all of timm, not only broadsight; needs a PATTERN")


@dataclass(frozen=True)
class VerifyRequest(Options):
    """Recompute every static figure of the papers' tables: paper, ours, match."""

    verb = "verify"

    families: tuple[str, ...] = option((), "papers to check; all if none is named", positional=True, metavar="FAMILY")
    json: bool = option(False, "print JSON")
    all: bool = option(False, "check every paper; the same as naming none")
