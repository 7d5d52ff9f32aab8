"""What is asked of the machine leaves it as it was."""

import pytest
import torch

from broadsight.benchmark.candidates import Settings
from broadsight.benchmark.machine import describe_machine, fixed_threads, gemm_peak


def test_describe_machine__names_what_changes_allocation_and_threads(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    machine = describe_machine(Settings())
    assert machine["memory_variables"]["MALLOC_ARENA_MAX"] == "2"
    assert machine["thread_variables"]["OMP_WAIT_POLICY"] == "passive" and machine["cpu"]
    assert gemm_peak("cpu", "bf16", (8, 10**9), seconds=0) > 0  # nobody could allocate the second
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), fixed_threads(threads + 1):
        assert torch.get_num_threads() == threads + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads
