"""Every test starts from the same seed on one thread, and none needs the internet."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before whoever reads it is imported

import pytest
import torch

import broadsight.models  # noqa: F401  registers the models
from tests.golden import read

torch.set_num_threads(1)  # for fixtures of a module too, which run before the one below

# Files are shared out to the processes in this order. The longest first, or one process waits for the other at the end.
LONGEST = (
    "test_verify",
    "test_distributed",
    "test_pooling",
    "test_resume",
    "test_compile_export",
    "test_registry",
    "test_broadcasting",
    "test_docs",
    "test_map",
    "test_cli",
    "test_released_map",
    "test_recipes",
    "test_run_folder",
    "test_fusion",
    "test_pyramid",
    "test_synchronise",
    "test_processes",
    "test_macs",
    "test_benchmark",
    "test_dense_training",
    "test_dense_commands",
    "test_stages",
    "test_training",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: names.get(item.path.stem, len(names)))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What is unpacked or drawn stays out of the user's cache."""
    os.environ["BROADSIGHT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _reproducible():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def golden():
    """Reads a golden file by name: its tensors and its config."""
    return read
