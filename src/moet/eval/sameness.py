"""Two subjects may differ in their routed experts and in nothing else. What cannot be seen from here is said, not assumed."""

import re
from pathlib import Path
from typing import Any

import torch

from moet.checkpoint import Checkpoint
from moet.checkpoint.index import read_json
from moet.errors import EvalError
from moet.eval.packed import PackView, open_view
from moet.eval.subject import Subject
from moet.eval.tokens import FolderTokenizer
from moet.forward.dense import PLAIN, DenseTensors

PROBE = (
    "The quick brown fox, 1234567890 jumps.\n\tif (x != 0) { return x->y; }  // naïve café\n"
    "Übergröße, ¿qué?, Привет мир, مرحبا, 你好，世界。 こんにちは 한국어 🙂🏳️‍🌈 <|im_start|>user\n"
)
"""Scripts, digits, code, runs of white space, an emoji of several code points, and what may or may not be a special token."""

CONFIG_NOISE = {"quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash", "use_cache", "compression_config"}
"""Keys of config.json that say how weights are stored or who wrote the file, not what the model computes."""


def check(reference: Subject, candidate: Subject) -> list[str]:
    """What was found to be equal, one sentence each, and what could not be looked at. Raises EvalError that lists all differences."""
    facts, wrong = [], []
    a, b = reference.tokenizer, candidate.tokenizer
    if a.start + a.encode(PROBE) == b.start + b.encode(PROBE):
        facts.append("tokenizers: a probe text of many scripts has the same tokens")
    else:
        wrong.append(f"tokenizers: expected the same tokens of a probe text, found {_first(a.start + a.encode(PROBE), b.start + b.encode(PROBE))}")
    for subject in (reference, candidate):
        _check_server(subject, facts, wrong)
    if reference.folder is None or candidate.folder is None:
        unseen = ", ".join(s.card.name for s in (reference, candidate) if s.folder is None)
        facts.append(f"NOT CHECKED: config and dense tensors, because the files of {unseen} are not on this machine")
    else:
        _check_folders(reference.folder, candidate.folder, facts, wrong)
    if reference.card.fingerprint and reference.card.fingerprint == candidate.card.fingerprint:
        facts.append(f"fingerprints: both come from the checkpoint {reference.card.fingerprint[:16]}")
    if wrong:
        lines = "\n  ".join(wrong)
        raise EvalError(f"{reference.card.name} and {candidate.card.name}: expected models that differ in their routed experts only, found\n  {lines}")
    return facts


def _first(a: list[int], b: list[int]) -> str:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[at : at + 3]} and {b[at : at + 3]} at token {at}"


def _check_server(subject: Subject, facts: list[str], wrong: list[str]) -> None:
    """A server's own tokenization against the folder's that is used in its place."""
    if subject.card.kind != "server" or not isinstance(subject.tokenizer, FolderTokenizer):
        return
    from moet.eval.server import ServerTokenizer

    try:
        theirs = ServerTokenizer(subject).encode(PROBE)  # type: ignore[arg-type]
    except EvalError:
        facts.append(f"NOT CHECKED: the tokenizer of {subject.card.name}, which has no /tokenize")
        return
    ours = subject.tokenizer.encode(PROBE)
    if theirs != ours:
        wrong.append(f"tokenizer of {subject.card.name}: expected the folder's tokens of a probe text, found {_first(ours, theirs)}")


def _check_folders(a: Path, b: Path, facts: list[str], wrong: list[str]) -> None:
    before = len(wrong)
    different = _differences(_config(a), _config(b))
    wrong.extend(f"config.json: expected equal values, found {d}" for d in different)
    x, y = FolderTokenizer(a).own, FolderTokenizer(b).own
    if x.get_vocab() != y.get_vocab():
        wrong.append(f"tokenizers: expected one vocabulary, found {len(x)} and {len(y)} tokens")
    if x.chat_template != y.chat_template:
        wrong.append("chat templates: expected one, found two different ones")
    if len(wrong) == before:
        facts.append("config, vocabulary and chat template: equal")
    _check_dense(open_view(a), open_view(b), facts, wrong)


def _config(folder: Path) -> dict[str, Any]:
    """As transformers understands it, so that a default that is written out is no difference; as it is written, where transformers does not know the model_type."""
    from transformers import CONFIG_MAPPING

    raw = read_json(folder / "config.json")
    known = raw.get("model_type") in CONFIG_MAPPING
    return _without_noise(CONFIG_MAPPING[raw["model_type"]].from_dict(raw).to_dict() if known else raw)


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_noise(v) for k, v in value.items() if k not in CONFIG_NOISE}
    return value


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{key}: {a.get(key)!r} and {b.get(key)!r}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def _check_dense(a: Checkpoint | PackView, b: Checkpoint | PackView, facts: list[str], wrong: list[str]) -> None:
    """Every tensor that is no routed expert: the same values. Where one side stores it quantized, the other's dtype is what it is rounded to, once."""
    left, right = (DenseTensors(v, v.dense) for v in (a, b))  # type: ignore[arg-type]
    tied = bool(a.config.get("tie_word_embeddings"))
    alone = {n for n in set(left.names) ^ set(right.names) if not (tied and n == "lm_head.weight")}
    drafting = {n for n in alone if _is_mtp(n, a.spec.num_layers)}
    if drafting:
        facts.append(f"MTP layers: only one side has them ({len(drafting)} tensors); they draft and do not decide")
    missing = sorted(alone - drafting)
    if missing:
        wrong.append(f"dense tensors: expected the same names, found {len(missing)} on one side only: {', '.join(missing[:4])}")
    names, bytewise = sorted(set(left.names) & set(right.names)), 0
    unequal = []
    for name in names:
        x, y = left.read(name), right.read(name)
        quantized = [d.checkpoint.tensor_info(d.stored(name)[0]).dtype not in PLAIN for d in (left, right)]
        bytewise += x.dtype == y.dtype and not any(quantized)
        if quantized[0] != quantized[1]:
            x, y = (x.to(y.dtype), y) if quantized[0] else (x, y.to(x.dtype))
        if x.shape != y.shape or not torch.equal(x.double(), y.double()):
            unequal.append(name)
    if unequal:
        wrong.append(f"dense tensors: expected equal values, found {len(unequal)} of {len(names)} that differ: {', '.join(unequal[:4])}")
    elif not missing:
        facts.append(f"dense tensors: {len(names)} equal, {bytewise} of them byte by byte, {len(names) - bytewise} in value across dtypes")


def _is_mtp(name: str, layers: int) -> bool:
    numbered = re.search(r"\blayers\.(\d+)\.", name)
    return bool(re.search(r"\bmtp\b", name)) or (numbered is not None and int(numbered[1]) >= layers)
