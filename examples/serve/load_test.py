"""Many clients at once ask the service; every answer is compared with what the model says of that image alone.

    python examples/serve/load_test.py model.onnx --clients 64 --requests 20 --json load.json

Starts services on this computer, one for each of --max-batch, and asks them in turns; options that are not its own go
to them. With --url it asks one that runs already, of the same model. Leaves with 1 if an answer was lost, mixed up or
wrong.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from clients import Tally, known_images, storm
from options import Parser
from options import parse as parse_service

from broadsight.benchmark.machine import describe_machine, load
from broadsight.benchmark.run import Settings, write_json
from broadsight.deployment.formats import open_artefact

PATIENCE = 120.0  # seconds for a service to load


@contextmanager
def serving(model: str, options: Sequence[str]) -> Generator[str, None, None]:
    """A service in a process of its own on a free port; gives its address once it is ready."""
    command = [sys.executable, str(Path(__file__).with_name("service.py")), model, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = (process.stdout.readline().split() or [""])[0] if process.stdout else ""
            if not url or not ready(url, process):
                raise ValueError(f"the service did not start (exit code {process.wait()})")
            yield url
        finally:
            process.terminate()


def ready(url: str, process: "subprocess.Popen[str] | None" = None) -> bool:
    """Wait until a service is ready to answer."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and (process is None or process.poll() is None):
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return True
        except httpx.HTTPError:
            if process is None:
                break
        time.sleep(0.1)
    if process is not None:
        process.terminate()
    return False


def metrics(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/metrics", trust_env=False).json()


def row_of(name: str, url: str, tally: Tally, before: dict[str, Any]) -> dict[str, Any]:
    """What is written down of one service; `before` are its counters at the beginning."""
    counted = metrics(url)
    sizes = {size: count - before["batch_sizes"].get(size, 0) for size, count in counted["batch_sizes"].items()}
    images, batches = (max(1, counted[key] - before[key]) for key in ("images", "batches"))
    limits = httpx.get(f"{url}/model", trust_env=False).json()["limits"]
    p50, p95, p99 = np.percentile(tally.seconds or [0.0], (50, 95, 99)) * 1000
    return {
        "service": name,
        "limits": limits,
        "asked": tally.asked,
        "answered": tally.answered,
        "lost": tally.lost,
        "mixed_up": tally.mixed,
        "wrong": tally.wrong,
        "failed": dict(tally.failed),
        "sent_away_and_came_again": tally.refused,
        "largest_error": tally.error,
        "images_per_second": float(np.median(tally.rounds)),
        "rounds": tally.rounds,
        "milliseconds": {"p50": p50, "p95": p95, "p99": p99, "max": 1000 * max(tally.seconds, default=0.0)},
        "service_cpu_milliseconds_per_image": 1000 * (counted["cpu_seconds"] - before["cpu_seconds"]) / images,
        "batch_sizes": {size: count for size, count in sizes.items() if count},
        "mean_batch": images / batches,
    }


def show(row: dict[str, Any], tally: Tally) -> None:
    time_ = row["milliseconds"]
    print(
        f"{row['service']}: {row['images_per_second']:.1f} images/s   "
        f"p50 {time_['p50']:.0f} ms   p95 {time_['p95']:.0f} ms   p99 {time_['p99']:.0f} ms   "
        f"CPU {row['service_cpu_milliseconds_per_image']:.1f} ms an image\n"
        f"  mean batch {row['mean_batch']:.1f}, batches by size {row['batch_sizes']}\n"
        f"  {row['asked']} asked, {row['answered']} answered, {row['lost']} lost, {row['mixed_up']} mixed up, "
        f"{row['wrong']} wrong, {sum(tally.failed.values())} failed, largest error {row['largest_error']:.1e}"
    )
    for reason, count in tally.reasons.most_common(3):
        print(f"  {count} times: {reason}")


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Options of ours, and those of the services."""
    about, _, more = (__doc__ or "").partition("\n")
    form = argparse.RawTextHelpFormatter
    parser = Parser("load_test.py", description=about, epilog=more, formatter_class=form, allow_abbrev=False)
    parser.add_argument("model", help="file that `broadsight export` wrote")
    parser.add_argument("--url", help="of a running service")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=64, help="different ones, the most")
    parser.add_argument("--images", metavar="FOLDER", help="images instead of drawn scenes")
    parser.add_argument("--max-batch", default="16", help="of the services, joined by commas; each is measured")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of a probability")
    parser.add_argument("--json", metavar="FILE")
    args, others = parser.parse_known_args(arguments)
    for name in ("clients", "requests", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}; expected 1 or more")
    if args.count < 2:
        parser.error(f"--count {args.count}; expected 2 or more")
    if args.url and others:
        parser.error(f"{others[0]} is an option of a service; the one of --url runs already")
    for most in args.max_batch.split(","):
        parse_service([args.model, "--max-batch", most, *others])  # leaves with 2 if they are wrong
    return args, others


def main() -> int:
    args, others = parse()
    with ExitStack() as stack:
        try:
            session = open_artefact(args.model, 1)
            known, alone = known_images(session, args.count, args.images)
            services = {args.url: args.url} if args.url else {}
            for most in [] if args.url else args.max_batch.split(","):
                options = ["--max-batch", most, *others]
                services[f"max-batch {most}"] = stack.enter_context(serving(args.model, options))
            if args.url and not ready(args.url):
                raise ValueError(f"--url {args.url}: no service is ready there")
        except (ValueError, OSError) as error:
            print(f"load_test.py: {error}", file=sys.stderr)
            return 2
        print(f"{session.description.title}: {len(known)} different images; one by one without a service {alone:.1f}/s")
        machine = describe_machine(Settings())
        before = {name: metrics(url) for name, url in services.items()}
        tallies = {name: Tally() for name in services}
        each = {key: getattr(args, key) for key in ("clients", "requests", "tolerance")}
        for turn in range(args.rounds):
            for name, url in services.items():
                asyncio.run(storm(url, known, tallies[name], **each, seed=turn))
        rows = [row_of(name, url, tallies[name], before[name]) for name, url in services.items()]
    for row in rows:
        show(row, tallies[row["service"]])
    if args.json:
        settings = {key: getattr(args, key) for key in ("clients", "requests", "rounds", "images", "tolerance")}
        settings |= {"different_images": len(known), "service_options": others}
        about = session.description
        model = {
            "title": about.title,
            "source": about.source,
            "file": Path(args.model).name,
            "image": about.image,
            "quantised": about.quantised is not None,
        }
        whole = {"machine": machine | {"load_after": load()}, "settings": settings, "model": model}
        write_json({**whole, "one_by_one_images_per_second": alone, "rows": rows}, args.json)
    return 0 if all(tally.faultless for tally in tallies.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
