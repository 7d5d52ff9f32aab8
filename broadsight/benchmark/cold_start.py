"""The cost of a cold start: a fresh process loads one artefact and answers once; importing libraries is apart."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..deployment.formats import runtimes
from ..inspection.precision import cast
from ..surgery.fusion import fuse
from .candidates import Candidate, Variant, channels, create
from .settings import Settings


@dataclass(frozen=True)
class StartUp:
    """Figures of a fresh process, compiling included. Of a mapped file only the touched pages count as memory."""

    import_s: float  # seconds to import this package and the runtime's
    seconds: float  # from then on, with a model or artefact that is loaded, to the first answer
    resident_bytes: int | None  # largest growth of the resident memory meanwhile; None where the system does not say


def measure(candidate: Candidate, settings: Settings, artefact: Path) -> StartUp:
    """Start a candidate in a fresh process from its file, or in torch its weights; RuntimeError says why it failed."""
    model: Any = candidate.model
    request = {
        "runtime": candidate.runtime,
        "precision": candidate.precision,
        "artefact": str(artefact),
        "images": [1, channels(candidate.variant, model), *candidate.size],
        "variant": asdict(candidate.variant),
        "settings": asdict(replace(settings, size=candidate.size)),
    }
    threads = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as cache:  # what was compiled before does not count
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(request),
            env=os.environ | threads | {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"a fresh process failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return StartUp(**json.loads(done.stdout.splitlines()[-1]))


def answer(request: dict[str, Any], started: float) -> StartUp:
    """Answer a request in this process, whose interpreter began at `started` on the clock of `time.time()`."""
    import numpy as np
    import torch

    settings, artefact = Settings(**request["settings"]), Path(request["artefact"])
    runtime, precision = request["runtime"], request["precision"]
    torch.set_num_threads(settings.threads)
    if runtime in runtimes():
        from ..deployment import open_artefact

        libraries = {"onnx": "onnxruntime", "openvino": "openvino", "executorch": "executorch.runtime"}
        if (name := runtimes()[runtime][0]) in libraries:
            importlib.import_module(libraries[name])
    else:
        from safetensors.torch import load_model

        from .. import models as models
    images = np.random.default_rng(0).standard_normal(request["images"], np.float32)
    imported = time.time()
    with suppress(OSError):  # forget the peak of the resident memory, which importing may have raised
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    begun = time.perf_counter()
    if runtime in runtimes():
        open_artefact(artefact, settings.threads, precision)(images)
    else:
        model = create(Variant(**request["variant"]), settings).eval()
        load_model(model, str(artefact))
        model = cast(fuse(model) if settings.fuse else model, precision)
        run = torch.compile(model, dynamic=False) if runtime == "compile" else model
        with torch.inference_mode():
            run(torch.from_numpy(images))
    seconds = time.perf_counter() - begun
    peak = _status("VmHWM")
    return StartUp(imported - started, seconds, None if before is None or peak is None else max(peak - before, 0))


def _status(name: str) -> int | None:
    """Bytes of an entry such as VmRSS of /proc/self/status; None if there is none."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return None


if __name__ == "__main__":
    began = time.time()
    with suppress(OSError, ValueError, IndexError):  # where the system says when this process was started
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        began = time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    print(json.dumps(asdict(answer(json.load(sys.stdin), began))))
