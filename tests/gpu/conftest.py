"""Everything in this folder needs a CUDA GPU; elsewhere it is skipped, visibly. `pytest tests/gpu --emulated` runs what the emulated kernels can do on the CPU:
slow, and good for finding mistakes in the tests themselves."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "cpu")]   # what the tests of both folders share


def pytest_addoption(parser):
    parser.addoption("--emulated", action="store_true", help="tests/gpu: the kernels' source on the CPU instead of a GPU")


def pytest_collection_modifyitems(config, items):  # pytest passes the items of every folder
    import torch

    if config.getoption("--emulated", default=False) or torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def emulated(request) -> bool:
    return bool(request.config.getoption("--emulated", default=False))


@pytest.fixture
def needs_graphs(emulated):
    if emulated:
        pytest.skip("CUDA graphs need a GPU")
