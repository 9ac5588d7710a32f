"""Packages to token files: the training stream, the held-out split and the prompts."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import chat
import invented
import numpy as np
import packages
import sources
import tokenizer as tok
from document import Document

HELD_OUT = 125  # one key in so many is never trained on
TEXT_BYTES, CHAT_BYTES, LONGEST = 600_000, 150_000, 12_000  # what of it is shipped


def held_out(document: Document) -> bool:
    """Decides by the key alone: every dictionary's entry on one headword falls on the same side."""
    return int(hashlib.sha1(document.key.encode()).hexdigest(), 16) % HELD_OUT == 0


def encode(tokenizer, texts: list[str], path: Path) -> int:
    """Writes `tokens` [T] uint16 and `starts` [D + 1] int64 (where each text begins); returns T."""
    pieces, starts = [], [0]
    for first in range(0, len(texts), 4096):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            texts[first : first + 4096], add_special_tokens=False
        ):
            pieces.append(np.asarray(encoding.ids, dtype=np.uint16))
            starts.append(starts[-1] + len(pieces[-1]))
    np.savez(path, tokens=np.concatenate(pieces), starts=np.asarray(starts, dtype=np.int64))
    return starts[-1]


def _write_lines(path: Path, rows: list[dict], limit: int) -> list[dict]:
    """Writes rows as JSON lines until `limit` bytes are reached; returns the rows written."""
    lines, size, kept = [], 0, []
    for row in rows:
        line = json.dumps(row, ensure_ascii=False)
        if size + len(line.encode()) < limit:
            size += len(line.encode()) + 1
            lines.append(line)
            kept.append(row)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return kept


def _prompts(conversations: list[tuple[str, list[dict]]], texts: list[dict]) -> list[dict]:
    """Up to four chat prompts of every source and kind, and eight plain beginnings, each with the true continuation."""
    rows, taken = [], Counter()
    for source, messages in conversations:
        tools = messages[0]["content"] if messages[0]["role"] == "tools" else None
        messages = messages[1:] if tools else messages
        kind = "tools" if tools else "chat"
        if taken[source, kind] < 4 and len(messages[0]["content"]) < 120:
            taken[source, kind] += 1
            row = {
                "kind": kind,
                "source": source,
                "messages": messages[:1],
                "reference": messages[1]["content"],
            }
            rows.append(row | ({"tools": tools} if tools else {}))
    for row in [row for row in texts if len(row["text"]) > 1500][:8]:
        cut = row["text"].rfind(" ", 0, 300)
        rows.append(
            {
                "kind": "completion",
                "source": row["source"],
                "prompt": row["text"][:cut],
                "reference": row["text"][cut : cut + 300],
            }
        )
    return [{"id": number} | row for number, row in enumerate(rows)]


def build(work: Path, demo: Path, seed: int = 0) -> None:
    """Everything before training. Writes demo/heldout, demo/train/CORPUS.md, the tokenizer and work/*.npz."""
    if (work / "chat.npz").exists():
        return
    rng = random.Random(seed)
    root = packages.fetch(work)
    texts, talks, kept_texts, kept_talks, text_bytes = [], [], [], [], Counter()
    for document in sources.documents(root):
        text_bytes[document.source] += len(document.text.encode())
        out = held_out(document)
        conversations = list(chat.from_document(document, rng))
        if out:
            kept_talks += [(document.source, c) for c in conversations]
        else:
            talks += conversations
        # WordNet repeats a meaning under each synonym; it is trained on as conversations only.
        if document.source != "dict-wn":
            (kept_texts if out else texts).append(document)
    packages.write_table(work, text_bytes, demo / "train/CORPUS.md")

    rng.shuffle(kept_texts)
    rng.shuffle(kept_talks)
    folder = demo / "heldout"
    folder.mkdir(parents=True, exist_ok=True)
    rows = _write_lines(
        folder / "text.jsonl",
        [{"source": d.source, "key": d.key, "text": d.text[:LONGEST]} for d in kept_texts],
        TEXT_BYTES,
    )
    _write_lines(folder / "chat.jsonl", [{"source": s, "messages": c} for s, c in kept_talks], CHAT_BYTES)
    _write_lines(folder / "prompts.jsonl", _prompts(kept_talks, rows), CHAT_BYTES)

    talks = chat.join(talks + list(invented.extras(rng)), rng)
    sample = [d.text for d in rng.sample(texts, len(texts) // 3)] + [
        m["content"] for c in rng.sample(talks, 40_000) for m in c if isinstance(m["content"], str)
    ]
    tokenizer = tok.build(sample, demo / "model")
    rng.shuffle(texts)
    counts = {
        "text": encode(tokenizer, [tok.BOS + d.text + tok.EOS for d in texts], work / "text.npz"),
        "chat": encode(tokenizer, [tok.render(tokenizer, c) for c in talks], work / "chat.npz"),
    }
    print(
        {"tokens": counts, "documents": len(texts), "conversations": len(talks), "prompts": len(rows)},
        flush=True,
    )
