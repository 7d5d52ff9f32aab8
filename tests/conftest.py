"""Every test starts from the same seed on one thread, and none needs the internet."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before whoever reads it is imported

import pytest
import torch

import broadsight.models  # noqa: F401  registers the models
from tests.golden import read

torch.set_num_threads(1)  # for fixtures of a module too, which run before the one below

# Files are shared out to the processes in this order. The longest first, or one process waits for the other at the end.
LONGEST = "verify distributed pooling resume compile_export registry broadcasting docs map cli released_map recipes"
LONGEST += " run_folder fusion pyramid synchronise processes macs dense_training dense_commands stages training"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
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
