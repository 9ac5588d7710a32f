"""One small model in every form that can be measured: NVFP4 checkpoint, pack of it, float32 checkpoint of the same values."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.cpu.pack_cases import pack_local
from tests.generators import write_qwen3_moe

TEXT = "The quick brown fox jumps over the lazy dog.\n\nA mixture of experts routes every token to a few experts; the router chooses them. Füße, 你好 and 🙂. " * 4


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("eval")
    found = {name: root / name for name in ("source", "pack", "plain")}
    for name in ("source", "plain"):
        found[name].mkdir()
    truth = write_qwen3_moe(found["source"], scheme="nvfp4_modelopt")
    truth.write_dequantized(found["plain"])
    pack_local(found["source"], found["pack"])
    return found


@pytest.fixture(scope="session")
def subjects(folders):
    """Whole models, loaded once: source, native, base, plain."""
    from moet.eval.subject import open_subject

    names = {"source": ("source", "native"), "native": ("pack", "native"), "base": ("pack", "base"), "plain": ("plain", "native")}
    return {name: open_subject(str(folders[folder]), precision=precision) for name, (folder, precision) in names.items()}
