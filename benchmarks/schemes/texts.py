"""Texts to calibrate on and to score: moet's own, the demo's, and what every Python brings along."""

import json
import sysconfig
from pathlib import Path

import torch
from score import Text

from moet.calibrate.tokens import Document, default_texts, read_file, windows

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "benchmarks" / "data" / "heldout"
PROGRAMS = ("argparse.py", "heapq.py", "textwrap.py", "json/decoder.py", "statistics.py", "configparser.py")
POSITIONS = 512
"""Tokens of a window that is scored."""


def documentation() -> list[Document]:
    """English documentation: the topics of pydoc, in an order that mixes them."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    return [Document(topics[name]) for i in range(4) for name in names[i::4]]


def programs() -> list[Document]:
    """Python source: modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [Document((folder / name).read_text("utf-8")) for name in PROGRAMS]


def held_out(demo: Path, part: slice) -> dict[str, list[Document]]:
    """The demo's held-out texts and conversations."""
    texts = [json.loads(line)["text"] for line in (demo / "heldout" / "text.jsonl").read_text("utf-8").splitlines()]
    return {"text": [Document(t) for t in texts][part], "chat": read_file(demo / "heldout" / "chat.jsonl")[part]}


def calibration(checkpoint: Path, model: str, name: str, tokens: int) -> torch.Tensor:
    """default: what `moet pack` takes. own: the kind of text that is scored, other documents of it: three quarters of the
    topics for SmolLM2, every other document for the demo."""
    if name == "default":
        return windows(checkpoint, default_texts(), tokens, 1024).ids
    if model == "demo":
        return windows(checkpoint, held_out(checkpoint.parent, slice(0, None, 2)), tokens, 1024).ids
    found = documentation()
    return windows(checkpoint, {name: found[: len(found) * 3 // 4]}, tokens, POSITIONS).ids


def scored(checkpoint: Path, model: str, tokens: int) -> dict[str, Text]:
    """About `tokens` tokens of each kind."""
    from transformers import AutoTokenizer

    if model == "demo":
        kinds = held_out(checkpoint.parent, slice(1, None, 2))
    else:
        found = documentation()
        kinds = {"documentation": found[len(found) * 3 // 4 :], "programs": programs()}
        kinds |= {"mixture": [d for path in sorted(HELD_OUT.glob("*.jsonl")) for d in read_file(path)]}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return {name: Text.of(tokenizer, windows(checkpoint, {name: docs}, tokens, POSITIONS).ids) for name, docs in kinds.items()}
