"""A row that cannot be read: its requests end with an error and no wrong token, the engine lives, and answers again once the row is whole."""

import pytest

from moet.checkpoint import LocalSource
from moet.pack import Pack
from moet.pack.packer import pack
from tests.e2e.engine_run import run
from tests.generators import write_qwen3_moe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    (folder / "source").mkdir()
    write_qwen3_moe(folder / "source", experts=8, top_k=8)  # every token asks for every expert
    pack(LocalSource(folder / "source"), folder / "pack")
    rows = Pack.open(folder / "pack").layers[1].rows("base")
    engine = {"additional_config": {"moet": {"ram_percent": 50, "preheat": False}}}
    step = {"model": str(folder / "pack"), "engine": engine}
    return run([{"name": "good", **step}, {"name": "bad", "spoil": [str(rows.path), rows.offset(5) + 100], **step}], folder / "run")


def test_every_request_of_the_step_fails_and_none_has_a_token(found):
    assert found["bad"]["finish"] == ["error"] * 3
    assert found["bad"]["ids"] == [[], [], []]
    assert found["bad"]["counters"]["checksum_failures"] > 0


def test_the_same_engine_answers_rightly_once_the_row_is_whole(found):
    mended = found["bad"]["mended"]
    assert mended["finish"] == ["length"] * 3
    # also: no block of the failed prompts stayed in the prefix cache
    assert (mended["ids"], mended["logprobs"]) == (found["good"]["ids"], found["good"]["logprobs"])
