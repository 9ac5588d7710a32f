"""What may differ and what may not."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from moet.errors import EvalError
from moet.eval import sameness
from moet.eval.subject import open_subject


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of the float32 checkpoint, to be changed."""
    return shutil.copytree(folders["plain"], tmp_path / "changed")


def change_tensor(folder, wanted, change):
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        for name in list(tensors):
            if wanted in name:
                change(tensors, name)
                save_file(tensors, path, metadata={"format": "pt"})
                return name
    raise AssertionError(f"no tensor {wanted}")


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(subjects, folder, name="base"):
    return sameness.check(open_subject(str(folder), precision="native"), subjects[name])


def test_source_and_pack(subjects):
    facts = " ".join(sameness.check(subjects["source"], subjects["base"]))
    assert "byte by byte, 0 in value" in facts and "both come from the checkpoint" in facts


def test_dequantized_reference(subjects):
    """Not one byte of its tensors is the pack's, and every value is."""
    facts = " ".join(sameness.check(subjects["plain"], subjects["base"]))
    assert " equal, 0 of them byte by byte" in facts and "fingerprints" not in facts


def test_experts_may_differ(subjects, copy):
    change_tensor(copy, "experts.3.up_proj", lambda t, n: t[n].mul_(1.5))
    check(subjects, copy)


def test_how_weights_are_stored_may_differ(subjects, copy):
    change_json(copy / "config.json", dtype="float32", transformers_version="0.0", use_cache=False, rms_norm_eps=1e-6)
    check(subjects, copy)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.gate.weight", "embed_tokens", "layers.1.input_layernorm"])
def test_dense_tensors_may_not(subjects, copy, name):
    def nudge(tensors, name):
        tensors[name].view(-1)[0] += 2.0**-10

    found = change_tensor(copy, name, nudge)
    with pytest.raises(EvalError, match=rf"1 of \d+ that differ: {found}"):
        check(subjects, copy)


def test_config_may_not(subjects, copy):
    change_json(copy / "config.json", rope_theta=5e5)
    with pytest.raises(EvalError, match="rope"):
        check(subjects, copy)


def test_vocabulary_may_not(subjects, copy):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-40]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EvalError, match="tokenizers: expected the same tokens of a probe text"):
        check(subjects, copy)


def test_chat_template_may_not(subjects, copy):
    for path in copy.glob("*.jinja"):
        path.write_text(path.read_text() + " ")
    with pytest.raises(EvalError, match="chat templates"):
        check(subjects, copy)


def test_all_differences_are_listed(subjects, copy):
    change_json(copy / "config.json", rope_theta=5e5)
    change_tensor(copy, "self_attn.q_proj", lambda t, n: t[n].zero_())
    with pytest.raises(EvalError) as error:
        check(subjects, copy)
    assert "rope" in str(error.value) and "q_proj" in str(error.value)


def test_another_model(subjects, tmp_path):
    from tests.generators import write_olmoe

    write_olmoe(tmp_path)
    with pytest.raises(EvalError, match="expected models that differ in their routed experts only"):
        check(subjects, tmp_path)
