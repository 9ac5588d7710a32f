"""Everything in this folder needs a CUDA GPU; elsewhere it is skipped, visibly."""

import pytest


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
