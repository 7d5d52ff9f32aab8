"""Tests of surgery run without gradients, as inference does; those that learn say `torch.enable_grad`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield
