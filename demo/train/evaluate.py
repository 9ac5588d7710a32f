"""Held-out numbers: bits per byte, expert shares, accepted draft tokens."""

import argparse
import json
import math
from pathlib import Path

import checkpoint
import tokenizer as tok
import torch
import torch.nn.functional as F
from config import ModelConfig
from model import Model
from transformers import AutoTokenizer


def masks(model: Model, two_bit: bool, device) -> torch.Tensor | None:
    """The `two_bit` argument of the model: every expert rounded, or none."""
    return torch.ones(model.c.moe_layers, 2, model.c.experts, device=device) if two_bit else None


def held_out(demo: Path, tokenizer) -> dict[str, tuple[torch.Tensor, int]]:
    """(tokens [T], bytes of text) of the held-out texts and conversations."""
    rows = [json.loads(line) for line in (demo / "heldout/text.jsonl").read_text("utf-8").splitlines()]
    talks = [
        json.loads(line)["messages"] for line in (demo / "heldout/chat.jsonl").read_text("utf-8").splitlines()
    ]
    texts = {
        "text": [tokenizer.bos_token + row["text"] + tokenizer.eos_token for row in rows],
        "chat": [tok.render(tokenizer, talk) for talk in talks],
    }
    sets = {}
    for name, parts in texts.items():
        whole = "".join(parts)
        ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        for marker in (tok.BOS, tok.EOS, tok.START, tok.END):  # markers are predicted, but are no text
            whole = whole.replace(marker, "")
        sets[name] = torch.tensor(ids), len(whole.encode())
    return sets


@torch.no_grad()
def bits_per_byte(
    model: Model,
    tokens: torch.Tensor,
    size: int,
    two_bit: bool,
    limit: int | None = None,
    length: int = 1024,
    batch: int = 16,
):
    """(bits per byte, bits per byte of the MTP head, loads [moe layers, E]) over windows of `length` tokens.

    At most `limit` windows are taken.

    The MTP head's value is for the token after next, which only it predicts.
    """
    device = model.lm_head.weight.device
    width = length + 2
    windows = tokens[: len(tokens) - (len(tokens) - 2) % length].unfold(0, width, length)[:limit]
    # Only full windows are scored; the bytes are scaled to the tokens that are.
    nats, nats_mtp, loads = 0.0, 0.0, 0
    for part in windows.split(batch):
        part = part.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden, mtp, load = model(part[:, :-1], masks(model, two_bit, device))
            loads = loads + load
            nats += F.cross_entropy(
                model.lm_head(hidden).float().flatten(0, 1), part[:, 1:-1].flatten(), reduction="sum"
            ).item()
            nats_mtp += F.cross_entropy(
                model.lm_head(mtp).float().flatten(0, 1), part[:, 2:].flatten(), reduction="sum"
            ).item()
    scored = windows.shape[0] * length / len(tokens) * size * math.log(2)
    return nats / scored, nats_mtp / scored, loads


def shares(loads: torch.Tensor) -> list[float]:
    """Per MoE layer, the share of routings that the most used 20 % of the experts (rounded to whole experts) serve."""
    top = round(0.2 * loads.shape[1])
    return [
        round(v, 4)
        for v in (loads.sort(dim=1, descending=True).values[:, :top].sum(1) / loads.sum(1)).tolist()
    ]


@torch.no_grad()
def greedy(
    model: Model, prompts: list[list[int]], new: int, stop: set[int], two_bit: bool
) -> tuple[list[list[int]], float]:
    """Greedy continuations (all prompts at once, nothing cached) and the share of MTP drafts they confirm.

    A draft counts when the token it would be checked against was generated after a generated token.
    """
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()) + new + 1, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    rows, mask = torch.arange(len(prompts), device=device), masks(model, two_bit, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for step in range(new):
            hidden, _, _ = model(tokens[:, : int(lengths.max()) + step + 1], mask)
            tokens[rows, lengths + step] = model.lm_head(hidden[rows, lengths + step - 1]).argmax(-1)
        _, mtp, _ = model(tokens, mask)
        drafts = model.lm_head(mtp).argmax(-1)  # [B, S]: column i guesses token i + 2
    outputs, right, total = [], 0, 0
    for row, draft, length in zip(tokens.tolist(), drafts.tolist(), lengths.tolist()):
        output = row[length : length + new]
        end = next((i for i, t in enumerate(output) if t in stop), new - 1)
        outputs.append(output[: end + 1])
        right += sum(draft[length + i - 2] == output[i] for i in range(1, end + 1))
        total += end
    return outputs, right / max(total, 1)


def prompt_tokens(demo: Path, tokenizer) -> tuple[list[dict], list[list[int]]]:
    """The held-out prompts and their tokens."""
    rows = [json.loads(line) for line in (demo / "heldout/prompts.jsonl").read_text("utf-8").splitlines()]
    tokens = []
    for row in rows:
        if row["kind"] == "completion":
            tokens.append(tokenizer(row["prompt"])["input_ids"])
        else:
            text = tokenizer.apply_chat_template(
                row["messages"], tools=row.get("tools"), tokenize=False, add_generation_prompt=True
            )
            tokens.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return rows, tokens


def report(
    model: Model, demo: Path, tokenizer, limit: int | None = None, new: int = 128
) -> tuple[dict, list[dict]]:
    """Numbers of the model as it is and with two-bit experts, and the greedy answers of both.

    `limit` caps windows and prompts: for trials on a CPU.
    """
    sets = held_out(demo, tokenizer)
    rows, prompts = (part[:limit] for part in prompt_tokens(demo, tokenizer))
    stop = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    numbers, answers = {}, [{k: row[k] for k in ("id", "kind")} for row in rows]
    for mode, two_bit in (("native", False), ("two_bit", True)):
        entry = {}
        for name, (tokens, size) in sets.items():
            entry[f"{name}_bits_per_byte"], entry[f"{name}_mtp_bits_per_byte"], loads = bits_per_byte(
                model, tokens, size, two_bit, limit
            )
            if name == "text":
                entry["top_fifth_share"] = shares(loads)
        outputs, entry["mtp_acceptance"] = greedy(model, prompts, min(new, limit or new), stop, two_bit)
        numbers[mode] = entry
        for answer, output in zip(answers, outputs):
            answer[mode] = tokenizer.decode(output, skip_special_tokens=True)
    return numbers, answers


def main() -> None:
    """Evaluates a plain checkpoint, for example what dequantize.py wrote."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for numbers.json and answers.json (the checkpoint's)"
    )
    parser.add_argument("--limit", type=int, default=None, help="cap of windows and prompts (for trials)")
    args = parser.parse_args()
    demo = Path(__file__).resolve().parent.parent
    model = Model(ModelConfig())
    model.load_state_dict(checkpoint.from_hf(checkpoint.read(args.checkpoint), model.c))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    numbers, answers = report(model, demo, AutoTokenizer.from_pretrained(demo / "model"), args.limit)
    out = args.out or args.checkpoint
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(json.dumps(numbers, indent=2) + "\n")
    (out / "answers.json").write_text(json.dumps(answers, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
