"""The command that lists models: models."""

import json
from typing import Any

from ..errors import UsageError, nearest
from ..papers.request import ModelsRequest
from ..visual.terminal import number, progress_bar, show
from .parser import DONE
from .tables import NAME, NUMBER, TEXT, columns, table


def models(request: ModelsRequest) -> int:
    """Show the models whose names match, with their figures."""
    pattern = request.pattern
    if request.all and pattern is None:
        raise UsageError("--all without a PATTERN; expected one, since timm holds over a thousand models")
    from ..models import FAMILIES
    from ..papers.verify import catalogue

    with progress_bar() as progress:
        rows = catalogue(pattern, progress)
    if request.all and pattern:
        rows += _foreign(pattern, {row["model"] for row in rows})
    if not rows:
        import timm

        known = timm.list_models(module="" if request.all else list(FAMILIES))
        near = nearest(pattern or "", known, 3)
        hint = f"nearest: {', '.join(near)}" if near else "use a wildcard such as 'stvit_*'"
        others = "" if request.all else "; --all searches timm as well"
        raise ValueError(f"no model matches {pattern!r}; {hint}{others}")
    if request.json:
        print(json.dumps(rows, indent=2))
        return DONE
    shown = []
    for row in rows:
        cells = [number(row["params"], 1e6), number(row["paper_params_m"]), number(row["macs"], 1e9)]
        cells += [number(row["paper_macs_g"]), number(row["paper_top1"], digits=1)]
        shown.append([row["model"], row["family"], *cells, row["source"]])
    figures = columns(NUMBER, "params M", "paper M", "MACs G", "paper G", "paper top-1 %")
    show(table({**columns(NAME, "model", "family"), **figures, "source": TEXT}, shown))
    return DONE


def _foreign(pattern: str, known: set[str]) -> list[dict[str, Any]]:
    """Catalogue rows for timm's own models, of which no paper's table is at hand."""
    import timm
    import torch

    from ..inspection.macs import executed_macs

    rows, names = [], [name for name in timm.list_models(pattern) if name not in known]
    with progress_bar() as progress:
        for i, name in enumerate(names):
            progress(i, len(names), name)
            with torch.device("meta"):
                model: Any = timm.create_model(name)
            channels, height, width = model.pretrained_cfg["input_size"]
            found = dict(model=name, family=type(model).__module__.rpartition(".")[2], source="timm")
            found |= dict.fromkeys(("paper_params_m", "paper_macs_g", "paper_top1"))
            found["params"] = sum(p.numel() for p in model.parameters())
            rows.append(found | {"macs": executed_macs(model, (height, width), channels)})
    return rows
