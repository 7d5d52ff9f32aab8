"""Files of weights that strangers wrote: loaded as finite real numbers, or refused in one line; nothing is executed."""

import io
import os
import pickle
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save

from broadsight.weights.loading import load_given
from broadsight.weights.reading import SHARED
from broadsight.weights.released_stvit import convert_release

from .watching import CANARY, Violation, refused


class Payload:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch /tmp/{CANARY}",)


def seeds() -> list[bytes]:
    """Sound files, the findings, and what resembles them."""
    own = dict(_model().state_dict())
    name, value = "layer1.0.conv1.weight", own["layer1.0.conv1.weight"]
    odd = [value.to(torch.complex64), value.to(torch.int64), value > 0, value * torch.nan, value.double() * 1e300]
    odd += [value.flatten()[:1].clone().expand(value.shape), value.to("meta"), value.to(torch.float8_e4m3fn)]
    found = [
        _packed(own),
        save(own),
        _packed({"state_dict": own, "epoch": 3, "x": Payload()}),
        _packed(own, legacy=True),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd += [value.to_sparse(), torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)]
        found += [_packed({**own, name: one}) for one in odd]
    found += [save({**own, name: one.clone().contiguous()}) for one in odd[:5]]
    found += [_packed({"w": torch.zeros(1).expand(400_000_000)}), _packed({f"{n}": value for n in range(200)})]
    found += [_compressed(_packed({"w": torch.zeros(20_000_000)})), pickle.dumps(Payload()), pickle.dumps({"a": 1})]
    found += [b"", b"PK\x03\x04", b"\x80\x02", (2**62).to_bytes(8, "little") + b"{}", b"\x08" + bytes(7) + b"[[[[[[[["]
    nested: Any = {}
    for _ in range(50):
        nested = {"state_dict": nested}
    return [*found, _packed(nested), _packed([own]), _packed({1: value}), _packed({"": value, "a\nb": value})]


def one(data: bytes) -> None:
    """Load a file of these bytes under both names, and convert it.

    Raises:
        Violation: Something was executed, loaded though not finite, or written though not stored.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-weights-") as folder:
        for name in ("x.pth", "x.safetensors"):
            path = Path(folder) / name
            path.write_bytes(data)
            model = timm.create_model("test_resnet", num_classes=2)
            if refused(lambda model=model, path=path: load_given(model, path)) is None:
                _check_finite(model)
        target = Path(folder) / "y.safetensors"
        if refused(lambda: convert_release(Path(folder) / "x.pth", target)) is None:
            if target.stat().st_size > SHARED * len(data) + 2**20:
                raise Violation(f"{len(data):,} bytes became {target.stat().st_size:,}")
        elif target.exists():
            raise Violation("refused, but written")


def _check_finite(model: torch.nn.Module) -> None:
    for name, value in model.state_dict().items():
        if not bool(torch.isfinite(value).all()):
            raise Violation(f"{name} is not finite")


@cache
def _model() -> Any:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=2)


def _packed(content: Any, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def _compressed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as plain, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    return buffer.getvalue()
