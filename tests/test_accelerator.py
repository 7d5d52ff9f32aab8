"""What runs on another device than the CPU gives the CPU's numbers, and waits for the device only where it has to.

The device is pretended, and lasts as long as a process: each check has one of its own.
"""

import json
import os
import subprocess
import sys

import pytest

MODELS = """
from copy import deepcopy
import timm, torch
from broadsight import fuse, swap_pool
from tests.compare import randomize
from tests.zoo import KINDS, shallow

def gradients(model, images):
    logits = model.train()(images)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits)).sum().backward()
    return torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])

def differences(model):
    images = torch.randn(2, 3, 72, 56)
    for module in model.modules():
        module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
    there = deepcopy(model).to("pretended")
    pairs = [(gradients(model, images), gradients(there, images.to("pretended")))]
    forms = [(one.eval(), fuse(one)) for one in (model, there)]
    accelerator.WAITS.clear()
    with torch.no_grad():
        pairs += [(one(images), other(images.to("pretended"))) for one, other in zip(*forms)]
    waits = dict(accelerator.WAITS)
    return {"error": max(((b.cpu() - a).norm() / a.norm()).item() for a, b in pairs), "waits": waits}

models = {name: shallow(name, num_classes=5) for name in KINDS}
models["map"] = swap_pool("test_resnet", "map", num_classes=5, groups=2, tokens=1, dim=24)
found = {name: differences(randomize(model)) for name, model in models.items()}
"""

TRAINING = """
import tempfile, types
from pathlib import Path
import timm.utils.model_ema as ema, torch
from broadsight.dense.scoring import AveragePrecision
from broadsight.training import engine, processes, run_folder
from broadsight.training.run import train
from tests.training.dense_runs import ask_dense
from tests.training.small_runs import SMALL_POOL, ask, fill

os.environ["ACCELERATE_TORCH_DEVICE"] = "pretended"
processes.has_gpu, run_folder.draw_curves = lambda *_: True, lambda *_: None
# Files want the addresses of tensors, which these have not.
engine.Engine.save, run_folder.RunFolder.keep_best = lambda _: None, lambda *_: "none"
ema.torch = types.SimpleNamespace(**{**vars(torch), "Generator": lambda **_: torch.Generator()})
found, folder = {}, Path(tempfile.mkdtemp())
data = fill(folder / "data", a=12, b=12)
changes = dict(ema=0.9, mixup=0.2, cutmix=0.2, erasing=0.5, clip_norm=1.0)
pool = dict(pool="map", pool_args=SMALL_POOL, out=str(folder / "a"))
requests = {"classify": ask(data, device="auto", **pool, changes=changes)}
requests |= {head: ask_dense(head, folder / head, device="auto") for head in HEADS}
for name, request in requests.items():
    accelerator.WAITS.clear()
    train(request, quiet=True)
    found[name] = dict(accelerator.WAITS)
"""


def run(code: str) -> dict:
    lines = f"import json, os\nfrom tests import accelerator\n{code}\nprint(json.dumps(found), flush=True)\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", lines], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_models__give_the_numbers_of_the_cpu_and_wait_for_nothing():
    for name, found in run(MODELS).items():
        assert found["error"] < 1e-4 and not found["waits"], (name, found)


@pytest.mark.parametrize(
    "heads", [["retinanet"], pytest.param(["mask_rcnn", "semantic_fpn", "simple_baseline"], marks=pytest.mark.slow)]
)
def test_training__waits_at_its_ends_and_for_labels_once_an_update(heads):
    for name, waits in run(f"HEADS = {heads!r}\n{TRAINING}").items():  # an epoch of 4 updates or more each
        by_file = {file: sum(n for key, n in waits.items() if key.startswith(file)) for file in ("engine", "class")}
        assert by_file == {"engine": 4, "class": 3 if name == "classify" else 0}, (name, waits)
        assert waits.get("detector.py check_labels", 0) == (4 if "rcnn" in name or "retina" in name else 0), waits
