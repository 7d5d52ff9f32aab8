"""Files of weights: everything that a model holds, complete or as it was."""

import errno
import os
import stat
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from broadsight import files
from broadsight.weights import writing
from broadsight.weights.writing import write_weights
from tests.refusals import refused


def test_weights__everything_whatever_its_memory(tmp_path):
    model = nn.Module()
    model.one = nn.Parameter(torch.randn(4, 3).t())
    model.same = model.one
    model.short = nn.Parameter(torch.randn(3).bfloat16())
    model.register_buffer("count", torch.tensor(7))
    write_weights(model, tmp_path / "weights.safetensors")
    read = load_file(tmp_path / "weights.safetensors")
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    # Others may read it
    before = os.umask(0o022)
    try:
        write_weights(nn.Linear(1, 1), tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights.safetensors").stat().st_mode) == 0o644


@pytest.mark.parametrize(("module", "place"), [(files, "flush"), (writing, "save_file")])
def test_weights__failed__as_they_were(module, place, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    write_weights(nn.Linear(2, 2), path)
    before = path.read_bytes()
    monkeypatch.setattr(module, place, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    refused("No space", write_weights, nn.Linear(2, 2), path, error=OSError)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
