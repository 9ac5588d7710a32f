"""Everything in this folder needs a CUDA GPU; elsewhere it is skipped, visibly."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):  # pytest passes the items of every folder
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
