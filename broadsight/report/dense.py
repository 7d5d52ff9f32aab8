"""What reports of dense runs and of their evaluations say."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..dense.scoring import defined, why_missing
from ..training.run_folder import CLASSES_JUDGED, over_classes
from ..visual.metrics import GOALS, HEADLINES, label, meaning
from ..visual.words import percent


def page_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the record of an evaluation into that of a report."""
    task, figures, data = record["task"], record["figures"], record["data"]
    goal, place = GOALS[task], data.get("place") or data.get("val")
    names = [name for name in HEADLINES[task] if name in figures]
    there, classes = record["coverage"]["occurring"], record["coverage"]["classes"]
    over = over_classes(there, classes).strip()
    asked = [f"{data['images']:,} images of {place}"]
    asked += ["mirrored as well"] * record["views"]["flip"] + ["by windows"] * record["views"]["slide"]
    if record["views"]["scales"] != [1.0]:
        asked.append(f"scales {', '.join(f'{scale:g}' for scale in record['views']['scales'])}")
    absent = dict(record["absent"])
    if figures.get(goal) is None:
        absent["figures"] = f"{meaning(goal).label} {why_missing(goal, there)}"
    latency = f"{record['latency_ms']:.1f} ms" if record["latency_ms"] else "-"
    device = f"{record['device']}, threads: {record['threads']}"
    rows = [["data", str(place)], ["time of an image", latency], ["device", device]]
    return {
        "title": record["model"]["title"],
        "kind": "evaluation",
        "subtitle": "; ".join(asked),
        "headline": [
            {"label": meaning(name).label, "value": percent(figures[name])} | ({"note": over} if name != "aacc" else {})
            for name in names
        ],
        "figures": defined(figures),
        "absent": absent,
        "class_figures": record["per_class"],
        "parameters": record["model"]["parameters"],
        "notes": [*record["notes"], *(["interrupted: not all images were asked about"] * record["interrupted"])],
        "facts": [{"group": "Evaluation", "rows": rows}],
        **{key: record[key] for key in ("skipped", "command", "versions", "commit")},
    }


def about_run(config: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]], seconds: float | None) -> dict[str, Any]:
    """Title, subtitle and facts of the report of a run, from its configuration and the metrics of its epochs."""
    run = config["broadsight"]
    settings, recipe = run["settings"], run["recipe"]
    rows = [["data", str(settings["data"])], ["head", settings["head"]], ["neck", settings["neck"]]]
    rows += [[name.replace("_", " "), str(recipe[name])] for name in ("epochs", "batch_size", "image_size", "lr")]
    rows += [["minutes", f"{seconds / 60:.1f}"]] if seconds else []
    last = epochs[-1] if epochs else {}
    goal, text = label(run["goal"]), f"{len(epochs)} of {recipe['epochs']} epochs"
    if last.get("best") is not None:
        text += f"; best {goal} {last['best']:.1f} %{over_classes(last.get(CLASSES_JUDGED), config['num_classes'])}"
    elif "best" in last:
        text += f"; no epoch has a {goal} to be compared by, so the model of the last one is kept"
    title = f"{settings['head']} with {settings['model']} on {settings['data']}"
    return dict(title=title, subtitle=text, facts=[{"group": "Training", "rows": rows}])
