"""F3 and what 2 bits cost: the demo against its own pack by `moet eval compare`, in `native` and in `base`, with the default scheme.

Both sides run offline, by transformers' classes: prefill and decode path, noise floor, greedy answers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO, RESULTS, ROOT, record

FLOOR = 10
"""Times the noise floor, up to which a KL is noise."""
SMALLEST = 1e-9
"""Nats; below it float32 arithmetic of another order is seen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="a pack of the demo; default: one is made")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    pack = options.pack or Path(tempfile.mkdtemp(prefix="moet-quality-")) / "pack"
    moet = [sys.executable, "-m", "moet"]
    subprocess.run([*moet, "pack", DEMO, pack], check=True)
    heldout = ROOT / "demo" / "heldout"
    for precision in ("native", "base"):
        out = options.out / f"quality-{precision}.json"
        text = ["--text", f"text={heldout / 'text.jsonl'}", "--text", f"chat={heldout / 'chat.jsonl'}"]
        size = ["--short", str(options.windows), "--long", "4", "--decode", "8", "--answers", "12", "--max-tokens", "32"]
        subprocess.run([*moet, "eval", "compare", DEMO, pack, "--precision", precision, *text, *size, "--out", out], check=True)
        result = json.loads(out.read_text())
        for claim in result["claims"]:
            claim["id"] = f"E.{precision}.{claim['id']}"
            claim["what"] = f"demo, `{precision}` against the checkpoint, {claim['what']}"
        if precision == "native":
            worst = max(p["kl"]["value"] for p in result["paths"].values())
            floor = max(p["floor_kl"] for p in result["paths"].values())
            limit = max(FLOOR * floor, SMALLEST)
            what = f"demo, `native` against the checkpoint: largest KL of a path, prefill or decode (noise floor {floor:.1e})"
            f3 = record.Claim("F3", what, worst, "nats a token", limit, "<=").as_dict()
            result["claims"] = [f3, *(c for c in result["claims"] if c["id"].endswith("greedy.equal"))]
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
