"""What a folder's model computes: against transformers on the dequantized checkpoint, and along every path against itself."""

import numpy as np
import pytest
import torch
import transformers

from moet.eval import measure
from moet.eval.subject import Prompt, open_subject
from moet.layout import reference
from moet.pack import Pack
from tests import generators
from tests.cpu.eval.conftest import TEXT
from tests.cpu.pack_cases import pack_local
from tests.generators import write_glm_moe_dsa, write_gpt_oss

NOISE = 1e-10  # nats: float32 logits of these models differ by less than 1e-5 between two ways to add them up


@pytest.fixture(scope="module")
def ids(subjects):
    tokenizer = subjects["source"].tokenizer
    found = tokenizer.start + tokenizer.encode(TEXT)
    assert tokenizer.decode(found[1:]) == TEXT
    return found


def logits(rows, ids, first=0):
    return rows.logits(first, len(ids) - 1)


def kl(a, b, ids, first=0):
    return measure.compare(a, b, torch.tensor(ids[first + 1 :])).kl.max()


def prefilled(subject, ids, shape="plain"):
    return logits(next(subject.prefill([ids], shape)), ids)


def test_forms_of_one_model(subjects, ids):
    ours = prefilled(subjects["source"], ids)
    assert torch.equal(ours, prefilled(subjects["native"], ids))
    assert kl(prefilled(subjects["plain"], ids), ours, ids) < NOISE


def test_transformers_says_so_too(folders, subjects, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["plain"], dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, :-1]
    assert kl(theirs, prefilled(subjects["native"], ids), ids) < NOISE


def test_base_rows(folders, subjects, ids):
    """transformers' model, its experts replaced by what the plain numpy twin of the row format says the base rows are."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["plain"], dtype=torch.float32)
    with torch.no_grad():
        for index, files in Pack.open(folders["pack"]).layers.items():
            experts = model.model.layers[index].mlp.experts
            rows = np.fromfile(files.base.path, np.uint8, offset=files.base.data_offset).reshape(files.base.experts, -1)
            for e, row in enumerate(rows):
                gate, up, down = reference.dequantize_row(files.base.geometry, row)
                experts.gate_up_proj[e] = torch.from_numpy(np.concatenate([gate, up]))
                experts.down_proj[e] = torch.from_numpy(np.ascontiguousarray(down))
        theirs = model(torch.tensor([ids])).logits[0, :-1]
    ours = prefilled(subjects["base"], ids)
    assert kl(theirs, ours, ids) < NOISE
    assert kl(prefilled(subjects["native"], ids), ours, ids) > 1e-3


@pytest.mark.parametrize("name", ["source", "base", "plain"])
def test_paths_agree(subjects, ids, name):
    subject = subjects[name]
    plain, other = prefilled(subject, ids), prefilled(subject, ids, "other")
    assert kl(plain, other, ids) < NOISE
    context = 20
    same, rows = subject.decode(ids, context)
    assert same == ids
    assert kl(plain[context - 1 :], logits(rows, ids, context - 1), ids, context - 1) < NOISE


@pytest.mark.parametrize("name, precision", [("source", "native"), ("pack", "base"), ("pack", "native")])
def test_one_layer_at_a_time(folders, subjects, ids, name, precision):
    subject = open_subject(str(folders[name]), precision=precision, stream=True)
    windows = [ids, ids[:50]]
    whole = subjects["base" if precision == "base" else "source"]
    for shape in ("plain", "other"):
        for window, a, b in zip(windows, whole.prefill(windows), subject.prefill(windows, shape), strict=True):
            assert kl(logits(a, window), logits(b, window), window) < NOISE


def test_answers_are_generate_s(folders, subjects):
    """transformers' own greedy generation."""
    subject, tokenizer = subjects["source"], subjects["source"].tokenizer
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["plain"], dtype=torch.float32)
    messages = ({"role": "user", "content": "the quick brown fox"},)
    for prompt, text in ((Prompt("p", "d", text="The router"), None), (Prompt("p", "d", messages=messages), tokenizer.render(list(messages), None))):
        ids = tokenizer.encode(text) if text else tokenizer.start + tokenizer.encode(prompt.text)
        theirs = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        answer = subject.answer(prompt, 12)
        assert list(answer.ids) + [1] * answer.stopped == theirs  # 1 ends a text


QUICK = ("write_gpt_oss", "write_kimi_k2", "write_mixtral")
FAMILIES = [pytest.param(w, marks=[] if w in QUICK else pytest.mark.slow) for w in generators.__all__ if w.startswith("write_")]


@pytest.mark.parametrize("write", FAMILIES)
def test_every_family(tmp_path, write):
    """Hidden states and head apart, in pieces, and token by token, give what the model itself gives in one call."""
    getattr(generators, write)(tmp_path)
    ids = list(range(3, 60))
    subject = open_subject(str(tmp_path), precision="native")
    with torch.no_grad():
        theirs = subject.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    assert torch.equal(theirs, prefilled(subject, ids))
    assert kl(theirs, prefilled(subject, ids, "other"), ids) < NOISE
    assert kl(theirs[9:], logits(subject.decode(ids, 10)[1], ids, 9), ids, 9) < NOISE


@pytest.mark.parametrize("write", [write_gpt_oss, write_glm_moe_dsa], ids=["biases, interleaved", "MTP layer, shared experts"])
def test_packs_of_other_kinds(tmp_path, write):
    """Rows into transformers' experts, where they have biases or another order, and MTP layers that transformers does not have."""
    source, pack = tmp_path / "source", tmp_path / "pack"
    source.mkdir()
    write(source)
    pack_local(source, pack)
    a, b = (open_subject(str(f), precision="native") for f in (source, pack))
    ids = list(range(3, 60))
    assert torch.equal(prefilled(a, ids), prefilled(b, ids))
    assert a.card.fingerprint == b.card.fingerprint == Pack.open(pack).fingerprint
