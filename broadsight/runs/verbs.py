"""What can be done with a run that is open: the verbs of the package, with this run for their first argument."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import broadsight

from ..training.run_folder import RunFolder, is_run


class Verbs:
    """Methods of a Classifier and a DenseModel. Their options are those of the functions of the same names."""

    @property
    def metrics(self: Any) -> Mapping[str, Any]:
        """What metrics.jsonl says of the epoch whose model a run kept; empty for others."""
        lines = RunFolder(Path(self.source)).metrics() if is_run(Path(self.source)) else []
        epochs = [line for line in lines if line["kind"] == "epoch"]
        kept = epochs[-1].get("best_epoch") if epochs else None
        return next((line for line in epochs if line["epoch"] == kept), epochs[-1] if epochs else {})

    def predict(self, images: Any, **options: Any) -> Any:
        """What images show; see `broadsight.predict`."""
        return broadsight.predict(self, images, **options)

    def evaluate(self, data: Any = None, **options: Any) -> Any:
        """How good it is on labelled images; see `broadsight.evaluate`."""
        return broadsight.evaluate(self, data, **options)

    def explain(self, images: Any = (), **options: Any) -> Any:
        """What it looks at; see `broadsight.explain`."""
        return broadsight.explain(self, images, **options)

    def export(self, format: str = "onnx", **options: Any) -> Any:
        """A file for another runtime; see `broadsight.export`."""
        return broadsight.export(self, format=format, **options)
