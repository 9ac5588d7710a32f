"""N1: `native` is the model: the demo served by moet against unmodified vLLM, without the plugin, on the checkpoint dequantized to float32.
B1: `base` is the model with its experts' 2-bit values: against transformers with the experts replaced by their dequantized base rows.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO, FLOAT32, MODE, RESULTS, ROOT, SEED_ENV, answers, difference, record, serving

PROMPTS, TOKENS = 20, 48


def reference_logprobs(checkpoint: Path, pack: Path, served: list[dict]) -> list[list[float]]:
    """Teacher-forced logprobs of the served tokens by transformers' model whose routed experts hold the pack's dequantized base rows."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from moet.layout import dequantize_row
    from moet.pack import Pack

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    opened = Pack.open(pack)
    with torch.no_grad():
        for index, files in opened.layers.items():
            if index >= model.config.num_hidden_layers:
                continue  # the MTP layer: transformers does not load it, and it only drafts
            experts = model.model.layers[index].mlp.experts
            rows = np.fromfile(files.base.path, np.uint8, offset=files.base.data_offset).reshape(files.base.experts, -1)
            for e, row in enumerate(rows):
                gate, up, down = dequantize_row(files.base.geometry, row)
                experts.gate_up_proj[e] = torch.from_numpy(np.concatenate([gate, up]))
                experts.down_proj[e] = torch.from_numpy(np.ascontiguousarray(down))
        result = []
        for a in served:
            ids = torch.tensor([a["prompt_token_ids"] + a["token_ids"]])
            logits = model(ids).logits[0, len(a["prompt_token_ids"]) - 1 : -1].log_softmax(-1)
            result.append(logits.gather(1, torch.tensor(a["token_ids"])[:, None])[:, 0].tolist())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.json")
    parser.add_argument("--pack", type=Path, help="a pack of the demo; default: one is made")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="moet-fidelity-"))
    plain, pack = work / "demo-float32", options.pack or work / "pack"
    subprocess.run([sys.executable, ROOT / "demo" / "dequantize.py", DEMO, plain, "--dtype", "float32"], check=True)
    subprocess.run([sys.executable, "-m", "moet", "pack", DEMO, pack], check=True)

    eager = ("--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20), "--max-model-len", "1024")
    with serving.stock(plain, *FLOAT32, *eager, log=work / "stock.log", env=SEED_ENV) as server:
        stock = answers(server, PROMPTS, TOKENS)
    served = {}
    for precision in ("native", "base"):
        options_ = ("--precision", precision, "--ram", "25%")
        with serving.moet(pack, *options_, log=work / f"{precision}.log", vllm=FLOAT32, env=SEED_ENV) as server:
            served[precision] = answers(server, PROMPTS, TOKENS)

    native = difference(stock, served["native"])
    reference = reference_logprobs(plain, pack, served["base"])
    worst = max(abs(x - y) for a, r in zip(served["base"], reference, strict=True) for x, y in zip(a["logprobs"], r, strict=True))
    drift = difference(stock, served["base"])
    claims = [
        record.Claim("N1a", "`native` against stock vLLM on the float32 checkpoint: equal greedy answers", native["equal"], f"of {PROMPTS}", PROMPTS, "=="),
        record.Claim("N1b", "`native` against stock vLLM: largest logprob difference", native["worst_logprob"], "nats", 1e-3, "<="),
        record.Claim("B1", "`base` against transformers with dequantized 2-bit experts: largest logprob difference", worst, "nats", 1e-3, "<="),
    ]  # fmt: skip
    samples = {
        "native_against_stock": native,
        "base_against_stock": drift,
        "texts": {"stock": [a["text"] for a in stock], **{p: [a["text"] for a in s] for p, s in served.items()}},
    }
    record.write(options.out, claims, samples, mode=MODE, prompts=PROMPTS, tokens=TOKENS)
    for c in claims:
        print(c.id, c.what, c.value, c.unit, "held" if c.held else "NOT HELD")


if __name__ == "__main__":
    main()
