"""Results of measures as the rows of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

# Names of columns, and rows of what stands in them: text, counts, figures, None for what there is not.
Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]


def variance(result: Any) -> Rows:
    columns = ("layer", "channels", "grid", "channel", "spatial", "channel, relative", "spatial, relative")
    rows = [
        (x.name, x.channels, f"{x.grid[0]}x{x.grid[1]}", x.channel, x.spatial, x.relative_channel, x.relative_spatial)
        for x in result.layers
    ]
    return columns, rows


def dead(result: Any) -> Rows:
    columns = ("activation", "function", "counted", "activations %", "dead channels", "of")
    return columns, [(x.name, x.function, x.counted, 100 * x.share, x.dead, x.channels) for x in result.layers]


def spectrum(result: Any) -> Rows:
    """Relative log-amplitudes at a quarter, half and all of the highest frequency."""
    rows = []
    for x in result.layers:
        count = len(x.frequencies) - 1
        places = [round(part * count) for part in (0.25, 0.5, 1.0)]
        at = [x.relative[place] if place else None for place in places]  # a small map has few frequencies
        rows.append((x.name, "x".join(map(str, x.spectrum.shape)), *at))
    return ("layer", "grid", "log amplitude at 1/4", "at 1/2", "at the highest"), rows


def entropy(result: Mapping[str, Any]) -> Rows:
    rows = [(name, x.keys, len(x.heads), float(x), x.uniform, 100 * x.density) for name, x in result.items()]
    return ("layer", "keys", "heads", "entropy, nats", "uniform", "% of uniform"), rows


def similarity(result: Mapping[str, Any]) -> Rows:
    rows = [(name, x.keys, x.queries, x.heads, x.reason or None) for name, x in result.items()]
    if not any(row[-1] for row in rows):
        return ("layer", "keys", "between queries", "between heads"), [row[:-1] for row in rows]
    return ("layer", "keys", "between queries", "between heads", "why not"), rows


def tokens(result: Any) -> Rows:
    whole = ("all", result.groups * result.tokens, _percent(result.bias), _percent(result.variance), None)
    rows = [
        (f"group {number}", result.tokens, _percent(one.bias), _percent(one.apart), _percent(one.variance))
        for number, one in enumerate(result.per_group, 1)
    ]
    return ("of", "tokens", "wrong %", "tokens apart from all %", "from their group %"), [whole, *rows]


def logits(result: Any) -> Rows:
    """How far apart tokens and groups are, in logits: root mean square distances from their centres."""
    tokens, groups = result.placed(), result.groups
    within = (tokens - groups[:, :, None]).square().sum(-1).mean((0, 2)).sqrt()  # G
    apart = (groups - result.aggregate[:, None]).square().sum(-1).mean(0).sqrt()
    rows = [
        (f"group {number}", result.tokens.shape[2], *distances)
        for number, distances in enumerate(zip(within.tolist(), apart.tolist(), strict=True), 1)
    ]
    return ("of", "tokens", "tokens from their group", "group from the aggregate"), rows


def interaction(result: Any) -> Rows:
    columns = ("order", "part of patches", "strength", "standard error", "floor", "absolute")
    figures = (result.fractions, result.strength, result.error, result.floor, result.absolute)
    return columns, list(zip(map(str, result.orders), *figures, strict=True))


def receptive_field(result: Any) -> Rows:
    columns = ("share of it", "side of the square, pixels", "of the image %", "densest part %")
    held = [result.held(share) for share in (0.2, 0.3, 0.5, 0.99)]
    rows = [(f"{100 * one.share:g} %", one.side, 100 * one.area, 100 * one.densest) for one in held]
    return columns, rows


def removal(result: Any) -> Rows:
    orders = list(result.top1)
    rows: list[Sequence[Any]] = [
        (f"{100 * fraction:g} % gone", *(result.top1[order][place] for order in orders))
        for place, fraction in enumerate(result.fractions)
    ]
    return ("top-1 %", *orders), [*rows, ("area", *(result.areas[order] for order in orders))]


def front(result: Any) -> Rows:
    unit = {"latency_ms": ("ms", 1.0), "macs": ("MACs G", 1e9), "parameters": ("parameters M", 1e6)}[result.x]
    rows = [
        (point.label, point.x / unit[1], point.accuracy, "yes" if point in one.best else "no", one.title)
        for one in result.fronts
        for point in one.points
    ]
    return ("model", unit[0], "top-1 %", "on the front", "of"), rows


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
