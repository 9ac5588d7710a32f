"""Trains the demo model: `python train.py` does every step from the packages to the report.

Steps that are done already are skipped; training continues from its last checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import corpus
import evaluate
import tokenizer as tok
import torch
from config import ModelConfig
from data import Epochs
from model import Model
from muon import Muon
from objective import balance, losses, rate, rounding
from transformers import AutoTokenizer

DEMO = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=DEMO / ".work", help="packages, token files, checkpoints"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the trained BF16 checkpoint (WORK/trained)"
    )
    parser.add_argument(
        "--seconds", type=float, default=500.0, help="training time; the schedule follows the clock"
    )
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps (for trials)")
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a window")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=int, default=None, help="cap of the evaluation's windows and prompts (for trials)"
    )
    parser.add_argument("--no-export", action="store_true", help="stop after training and evaluation")
    return parser.parse_args()


def optimizers(model: Model, args: argparse.Namespace, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, head, routers and norms."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = p.ndim > 1 and "embed" not in name and "lm_head" not in name and ".gate.weight" not in name
        (matrices if inside else others).append(p)
    adam = torch.optim.AdamW(
        others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
    )
    chosen = [Muon(matrices, lr=args.muon_lr), adam]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return chosen


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
            loss, main, ahead, loads = step_losses(
                model, next(batches), rounding(c, progress, generator).to(device)
            )
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        balance(model, loads, progress)
        history["step"] += 1
        history["tokens"] += args.batch * args.length
        if history["step"] % 20 == 0 or history["step"] <= 3:
            point = [history["tokens"], round(main.item(), 4), round(ahead.item(), 4)]
            started = started or time.time()  # compilation, in the first step, is not training time
            history["seconds"] = done + time.time() - started
            history["curve"].append(point)
            if history["step"] % 200 == 0 or history["step"] <= 40:
                print(
                    history["step"],
                    round(history["seconds"], 1),
                    point,
                    [round(v, 3) for v in evaluate.shares(loads)],
                    flush=True,
                )
        if history["step"] % 1000 == 0:
            history["held_out"].append(
                [history["tokens"], evaluate.bits_per_byte(model, *watched, two_bit=False)[0]]
            )
            print("held-out bits per byte", history["held_out"][-1], flush=True)
        if time.time() - saved_at > 120:
            saved_at = time.time()
            save(
                path,
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in chosen],
                    "history": history,
                },
            )
    save(
        path,
        {"model": model.state_dict(), "optimizers": [o.state_dict() for o in chosen], "history": history},
    )
    return model, history


def publish(args: argparse.Namespace) -> None:
    """NVFP4 export, its evaluation through dequantize.py, report."""
    import export  # modelopt and matplotlib are needed for this step alone
    import report

    export.main(args.out, DEMO, args.work)
    plain = args.work / "plain"
    subprocess.run([sys.executable, str(DEMO / "dequantize.py"), str(DEMO / "model"), str(plain)], check=True)
    subprocess.run([sys.executable, str(DEMO / "train/evaluate.py"), str(plain)], check=True)
    report.main(args.out, plain, DEMO / "train")


def main() -> None:
    args = arguments()
    args.work = args.work.resolve()
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
        publish(args)


if __name__ == "__main__":
    sys.exit(main())
