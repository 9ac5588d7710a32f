"""Everything in this folder needs a CUDA GPU; elsewhere it is skipped, visibly. `pytest tests/gpu --emulated` runs what the emulated kernels can do on the CPU:
slow, and good for finding mistakes in the tests themselves."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "cpu")]   # what the tests of both folders share


def pytest_addoption(parser):
    parser.addoption("--emulated", action="store_true", help="tests/gpu: the kernels' source on the CPU instead of a GPU")
    parser.addoption("--reduced", action="store_true", help="tests/gpu: random layers of the emulator's sizes on a GPU, and long waits: for compute-sanitizer")


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


@pytest.fixture(scope="session")
def reduced(request) -> bool:
    return bool(request.config.getoption("--reduced", default=False))


@pytest.fixture
def needs_graphs(emulated):
    if emulated:
        pytest.skip("CUDA graphs need a GPU")


@pytest.fixture
def opened(emulated, reduced):
    """open(layers, gpu_bytes=0, top_k=4, rank=0, world=1, least=False, **options) -> an armed runtime; all are closed at the end. gpu_bytes 0: all rows; least: or what is needed at least."""
    from expert_layers import open_runtime, poison_memory, registration

    held = []

    def open(layers, gpu_bytes: int = 0, top_k: int = 4, rank: int = 0, world: int = 1, least: bool = False, **options):
        poison_memory(emulated or reduced)
        store = layers.store(register=registration(emulated), rank=rank, world=world)
        held.append(store)
        runtime = open_runtime(store, layers, top_k, emulated, **({"limit_s": 60.0} | options if reduced else options))
        held.append(runtime)
        runtime.allocate(max(gpu_bytes, runtime.gpu_bytes_minimum()) if least else gpu_bytes)
        runtime.arm(True)
        return runtime

    yield open
    while held:
        held.pop().close()
