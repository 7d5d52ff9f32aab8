"""The curves of several runs on the same data: one page, and one plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import whole_folder, write_text
from ..provenance import header
from ..training.records import check_records, history
from ..training.run_folder import CURVES, REPORT, RunFolder
from ..training.settings import title
from ..visual.metrics import GOALS, label
from ..visual.plots import PALETTE, need_matplotlib, new_panels, save
from ..visual.words import NOTHING, amount, number, percent
from .charts import Chart
from .curves import of_runs
from .page import render

PLACE = ("data", "val", "root", "split")  # settings that say where images are
LINES = ("-", (0, (5, 3)), ":", "-.")  # as the page's dashes, when there are more runs than colours


def report_together(paths: Sequence[Path], folder: Path, command: str = "") -> Path:
    """Write the page and the plot of several runs into a new folder; a ValueError if they share no axis."""
    if twice := [path for place, path in enumerate(paths) if path.resolve() in map(Path.resolve, paths[:place])]:
        raise ValueError(f"{twice[0]} is given twice; give every run once")
    runs: list[dict[str, Any]] = []
    for path in paths:
        check_records(RunFolder(path))
        runs.append(history(RunFolder(path)))
        if what := _unlike(runs[0], runs[-1]):
            advice = "figures of different data have no axis in common; draw those runs apart"
            raise ValueError(f"{path} {what} than {paths[0]}; {advice}")
    names = [path.name for path in paths]
    names = names if len(set(names)) == len(names) else [str(path) for path in paths]
    metrics = [[line for line in RunFolder(path).metrics() if line["kind"] == "epoch"] for path in paths]
    if not any(metrics):
        raise ValueError(f"none of {', '.join(names)} has finished an epoch: there is nothing to draw yet")
    first = runs[0]["settings"]
    goal = label(GOALS[runs[0].get("task", "classify")])
    heads = ["run", "model", "seed", "parameters", "epochs", f"best {goal}", "its epoch", "training loss"]
    rows = [_row(*one, first.get("head")) for one in zip(names, runs, metrics, strict=True)]
    short = [name for name, row in zip(names, rows, strict=True) if "of" in row[4]]
    notes = [f"not finished: {', '.join(short)}; drawn as far as they came"] if short else []
    if len({run.get("data", {}).get("fingerprint") for run in runs}) > 1:
        notes.append("the runs trained and validated on different parts of the same data, such as those of other seeds")
    record = {
        "title": f"{len(paths)} runs on {first['data']}",
        "kind": "run",
        "subtitle": f"curves of {', '.join(names)}, on the same data",
        "notes": notes,
        "runs": dict(heads=[*heads, "validation loss"], rows=rows),
        "command": command,
        **{key: value for key, value in header().items() if key in ("versions", "commit")},
    }
    curves = dict(zip(names, metrics, strict=True))
    with whole_folder(folder) as unfinished:
        write_text(render(record, curves=curves), unfinished / REPORT)
        try:
            need_matplotlib()
        except ValueError:  # an extra; the page has the charts
            return folder / REPORT
        _plot(of_runs(curves), unfinished / CURVES)
    return folder / REPORT


def _unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what a run differs so that its figures mean something else; nothing if they mean the same."""
    tasks = [one.get("task", "classify") for one in (first, other)]
    if tasks[0] != tasks[1]:
        return f"learned another task ({tasks[1]}, not {tasks[0]})"
    prints = [one.get("data", {}).get("fingerprint") for one in (first, other)]
    places = [[one["settings"].get(name) for name in PLACE] for one in (first, other)]
    if places[0] == places[1] or (prints[0] is not None and prints[0] == prints[1]):
        return ""
    return f"learned from other images ({places[1][0]}, not {places[0][0]})"


def _row(name: str, run: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], head: str | None) -> list[str]:
    """The cells of a run in the table."""
    recipe, last = run["recipe"], epochs[-1] if epochs else {}
    whole, done = recipe["epochs"] + recipe.get("cooldown_epochs", 0), last.get("epoch", 0)
    cells = [name, title(run["settings"]), str(run.get("seed", NOTHING)), amount(run.get("parameters"))]
    cells += [f"{done}" if done >= whole else f"{done} of {whole}", percent(last.get("best"))]
    cells.append(number(last["best_epoch"]) if last.get("best") is not None else NOTHING)
    return [*cells, number(last.get("train_loss")), number(last.get("val_loss"))]


def _plot(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts of the page beside each other."""
    figure, panels = new_panels(path, 4.2 * len(charts), 3.6, columns=len(charts))
    for panel, chart in zip(panels, charts, strict=True):
        for line in chart.lines:
            look: Any = dict(color=PALETTE[(line.colour or 0) % len(PALETTE)], linestyle=LINES[line.dash % len(LINES)])
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            panel.plot(x, y, marker=".", label=line.name, **look)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label)
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)
