"""What the acceptance programs share: the demo, its held-out prompts, comparing two sets of answers, and where results go."""

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import record  # noqa: F401
import serving

from moet.config import MoetConfig

DEMO = ROOT / "demo" / "model"
RESULTS = ROOT / "docs" / "results"
SEED_ENV = {"OMP_NUM_THREADS": "1"}
FLOAT32 = ("--dtype", "float32")
MODE = f"base and native, {MoetConfig().activations} activations inside the experts, float32 outside"


@functools.cache
def prompts(count: int) -> list[str]:
    """`count` held-out prompts, none of which was trained on, as the text that the model sees: chats through the chat template, completions as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    lines = (ROOT / "demo" / "heldout" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:count]
    assert len(rows) == count, f"demo/heldout/prompts.jsonl holds {len(rows)} prompts, expected at least {count}"
    return [
        tokenizer.apply_chat_template(r["messages"], tools=r.get("tools"), add_generation_prompt=True, tokenize=False)
        if "messages" in r
        else tokenizer.bos_token + r["prompt"]
        for r in rows
    ]


def answers(server: serving.Server, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Greedy answers to the held-out prompts, one at a time, so that every run forms the same steps."""
    return [server.complete(p, max_tokens, ignore_eos=True, add_special_tokens=False) for p in prompts(count)]


def equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Token ids and every logprob that the server printed are the same numbers."""
    return a == b


def difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, float]:
    """How many answers have equal token ids, and the largest difference of a chosen token's logprob before the first other token."""
    same, worst, compared = 0, 0.0, 0
    for x, y in zip(a, b, strict=True):
        same += x["token_ids"] == y["token_ids"]
        for i, (s, t) in enumerate(zip(x["token_ids"], y["token_ids"], strict=False)):
            if s != t:
                break
            worst = max(worst, abs(x["logprobs"][i] - y["logprobs"][i]))
            compared += 1
    assert math.isfinite(worst)
    return {"equal": same, "of": len(a), "worst_logprob": worst, "tokens_compared": compared}
