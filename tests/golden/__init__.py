"""Golden files: outputs of the authors' code, names in their releases, and weights that follow from those names."""

import gzip
import json
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent
ORIGINALS = HERE.parents[2] / "shared"
# The scale of matrices and kernels, which the originals have for each paper.
GAIN = {"map": 1.5, "stvit": 0.6}


def read(name: str) -> tuple[dict[str, Tensor], dict]:
    """Tensors and config of a file; skips the test where the file is too large to be in the repository."""
    path = HERE / f"{name}.safetensors"
    path = path if path.exists() else ORIGINALS / "golden" / path.name
    if not path.exists():
        pytest.skip(f"{path.name} is too large for tests/golden, and the originals are not beside the repository")
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata().get("config", "{}"))
    return load_file(path), config


@cache
def key_lists() -> dict[str, dict]:
    return json.loads(gzip.decompress((HERE / "keys.json.gz").read_bytes()))


def checkpoint(model: str) -> dict[str, Tensor]:
    """All that the authors store of a model, with weights made from the names."""
    gain, entries = GAIN[model.partition("_")[0]], key_lists()[model].items()
    return {name: _tensor(name, entry["shape"] if isinstance(entry, dict) else entry, gain) for name, entry in entries}


def _tensor(name: str, shape: list[int], gain: float) -> Tensor:
    last = name.rpartition(".")[2]
    if last == "num_batches_tracked":
        return torch.tensor(0)
    if last == "bp_index":  # the upper triangle of a square matrix
        side = round((2 * shape[0]) ** 0.5 - 0.5)
        return torch.tensor([i * side + j for i in range(side) for j in range(i, side)])
    if name.endswith("fold.weights"):  # each of the nine neighbours
        return torch.eye(9).view(shape)
    z = np.random.RandomState(crc32(name.encode()) & 0x7FFFFFFF).standard_normal(shape)
    if last == "running_mean":
        z = 0.1 * z
    elif last == "running_var":
        z = np.exp(0.2 * z)
    elif last == "pos_embed" or "relative_position_bias_table" in name:
        z = 0.2 * z
    elif len(shape) >= 2:
        z = gain * z / np.sqrt(np.prod(shape[1:]))
    elif last.startswith("gamma"):
        z = 0.2 + 0.05 * z
    elif last == "weight":
        z = 1 + 0.1 * z
    else:
        z = 0.1 * z
    scales = {"conv3.1.weight": 0.25, "bp_reduction.1.running_var": 0.002, "bp_reduction.1.running_mean": 0.02}
    z = z * next((scale for part, scale in scales.items() if name.endswith(part)), 1)
    return torch.from_numpy(np.float32(z))


def images(height: int, width: int) -> Tensor:
    """Two images of coarse and fine noise, in double precision."""
    random = np.random.RandomState(7)
    coarse = random.standard_normal((2, 3, -(-height // 16), -(-width // 16))).repeat(16, 2).repeat(16, 3)
    fine = random.standard_normal((2, 3, height, width))
    return torch.from_numpy(np.float32(coarse[:, :, :height, :width] + 0.3 * fine)).double()
