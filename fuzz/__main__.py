"""Mutated inputs against every target; `make fuzz` runs this."""

import argparse
import importlib
import sys
from pathlib import Path

from .hunt import run

TARGETS = ("checkpoints", "command_lines", "images", "run_folders", "tars")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all without one")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (60)")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="most inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="another number gives other inputs (0)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="folder for inputs that break a target")
    parser.add_argument("--input", type=Path, help="try the content of this file once, as one target's input")
    asked = parser.parse_args()
    unknown = [name for name in asked.target if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {unknown[0]!r}; expected one of {', '.join(TARGETS)}")
    if asked.input is not None:
        if len(asked.target) != 1:
            parser.error("--input needs one TARGET, the one that the file is for")
        importlib.import_module(f"fuzz.{asked.target[0]}").one(asked.input.read_bytes())
        print(f"{asked.target[0]}: {asked.input} is read or refused as promised")
        return 0
    kept = [run(name, asked.seconds, asked.cases, asked.seed, asked.out) for name in asked.target or TARGETS]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
