"""Trains the demo model: `python train.py` does every step from the packages to the report.

Steps that are done already are skipped; training continues from its last checkpoint.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

import checkpoint
import corpus
import evaluate
import tokenizer as tok
from config import ModelConfig
from data import Epochs
from model import Model
from muon import Muon

DEMO = Path(__file__).resolve().parent.parent
MTP_WEIGHT = 0.3
QUIET_END = 0.9  # no more balancing after this share of the time, so that the biases settle
SPARSE, CROWDED, BIAS_RATE = 0.3, 2.5, 1e-3  # an expert outside this band of the mean load is moved
TWO_BIT_START, ALL, MIXED = 0.2, 0.45, 0.2  # shares of the steps with every expert / a random half rounded


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=DEMO.parent / ".demo", help="packages, token files, checkpoints")
    parser.add_argument("--out", type=Path, default=None, help="folder of the trained BF16 checkpoint (WORK/trained)")
    parser.add_argument("--seconds", type=float, default=500.0, help="training time; the schedule follows the clock")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps (for trials)")
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a window")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="cap of the evaluation's windows and prompts (for trials)")
    parser.add_argument("--no-export", action="store_true", help="stop after training and evaluation")
    return parser.parse_args()


def losses(model: Model, tokens: torch.Tensor, two_bit: torch.Tensor):
    """tokens [B, S + 2] -> (loss, next-token loss, token-after-next loss, loads [moe layers, E])

    The MTP head learns the text and, in equal parts, what the model itself will say: a draft
    is accepted when it equals the model's choice, not the text's.
    """
    hidden, mtp, loads = model(tokens[:, :-1], two_bit)
    logits, ahead = model.lm_head(hidden).float(), model.lm_head(mtp).float()
    main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
    text = F.cross_entropy(ahead.flatten(0, 1), tokens[:, 2:].flatten())
    teacher = logits[:, 1:].detach().softmax(-1)
    own = -(teacher * ahead[:, :-1].log_softmax(-1)).sum(-1).mean()
    return main + MTP_WEIGHT * 0.5 * (text + own), main.detach(), text.detach(), loads


def rate(progress: float) -> float:
    """Learning-rate factor: short warm-up, flat until a quarter, cosine to 2 %."""
    if progress < 0.01:
        return progress / 0.01
    return 1.0 if progress < 0.25 else 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - 0.25) / 0.75))


def rounding(c: ModelConfig, progress: float, generator: torch.Generator) -> torch.Tensor:
    """Which experts [moe layers, 2, E] are rounded to two bits in this step."""
    shape, draw = (c.moe_layers, 2, c.experts), torch.rand((), generator=generator).item()
    if progress < TWO_BIT_START or draw > ALL + MIXED:
        return torch.zeros(shape)
    return torch.ones(shape) if draw < ALL else torch.randint(0, 2, shape, generator=generator).float()


def optimizers(model: Model, args: argparse.Namespace, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, head, routers and norms."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = p.ndim > 1 and "embed" not in name and "lm_head" not in name and ".gate.weight" not in name
        (matrices if inside else others).append(p)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    chosen = [Muon(matrices, lr=args.muon_lr), adam]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return chosen


@torch.no_grad()
def balance(model: Model, loads: torch.Tensor) -> None:
    """Moves the choice biases of experts whose load left the band; within it, experts may specialise."""
    for moe, load in zip(model.moes(), loads):
        relative = load / load.mean()
        moe.gate.e_score_correction_bias += BIAS_RATE * ((relative < SPARSE).float() - (relative > CROWDED).float())


def save(path: Path, state: dict) -> None:
    """Writes a checkpoint so that a stop in the middle leaves the old one whole."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(args: argparse.Namespace, device: str, watched: tuple[torch.Tensor, int]) -> tuple[Model, dict]:
    """Returns the trained model and the history of the run; `watched` is the held-out text (tokens, bytes)."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    c = ModelConfig()
    model = Model(c).to(device)
    model.reset()
    chosen = optimizers(model, args, device)
    generator = torch.Generator().manual_seed(args.seed)
    history = {"step": 0, "seconds": 0.0, "tokens": 0, "curve": [], "held_out": []}
    path = args.work / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(chosen, state["optimizers"]):
            optimizer.load_state_dict(saved)
        history = state["history"]
    step_losses = torch.compile(losses) if args.compile else losses
    batches = Epochs(args.work, args.length, args.seed + history["step"]).batches(args.batch, device)
    done, started, saved_at = history["seconds"], None, time.time()
    while history["seconds"] < args.seconds and history["step"] < args.steps:
        progress = min(1.0, history["seconds"] / args.seconds)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(progress)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, main, ahead, loads = step_losses(model, next(batches), rounding(c, progress, generator).to(device))
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if progress < QUIET_END:
            balance(model, loads)
        history["step"] += 1
        history["tokens"] += args.batch * args.length
        if history["step"] % 20 == 0 or history["step"] <= 3:
            point = [history["tokens"], round(main.item(), 4), round(ahead.item(), 4)]
            started = started or time.time()  # compilation, in the first step, is not training time
            history["seconds"] = done + time.time() - started
            history["curve"].append(point)
            if history["step"] % 200 == 0 or history["step"] <= 40:
                print(history["step"], round(history["seconds"], 1), point, [round(v, 3) for v in evaluate.shares(loads)], flush=True)
        if history["step"] % 1000 == 0:
            history["held_out"].append([history["tokens"], evaluate.bits_per_byte(model, *watched, two_bit=False)[0]])
            print("held-out bits per byte", history["held_out"][-1], flush=True)
        if time.time() - saved_at > 120:
            saved_at = time.time()
            save(path, {"model": model.state_dict(), "optimizers": [o.state_dict() for o in chosen], "history": history})
    save(path, {"model": model.state_dict(), "optimizers": [o.state_dict() for o in chosen], "history": history})
    return model, history


def main() -> None:
    args = arguments()
    args.out = args.out or args.work / "trained"
    args.work.mkdir(parents=True, exist_ok=True)
    corpus.build(args.work, DEMO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    watched = evaluate.held_out(DEMO, tokenizer)["text"]
    model, history = train(args, device, watched)
    checkpoint.write(checkpoint.half(checkpoint.to_hf(model.cpu().state_dict(), model.c)), args.out)
    stop = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(tok.END)]
    config = model.c.to_hf(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "history.json").write_text(json.dumps(history | {"stop": stop, "device": device}) + "\n")
    model.load_state_dict(checkpoint.from_hf(checkpoint.read(args.out), model.c))  # judge what is shipped
    numbers, answers = evaluate.report(model.to(device), DEMO, tokenizer, args.limit)
    (args.out / "numbers.json").write_text(json.dumps(numbers, indent=2) + "\n")
    (args.out / "answers.json").write_text(json.dumps(answers, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(numbers), flush=True)
    if not args.no_export:
        import export  # modelopt is needed for this step alone
        export.main(args.out, DEMO, args.work)


if __name__ == "__main__":
    sys.exit(main())
