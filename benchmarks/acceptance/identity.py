"""M1: what the demo's server says does not depend on what the arena holds. M5: the arena keeps to its budget.

Serves the demo in `base` and `native` from arenas of 5, 25 and 100 % (cold, warm, and after a restart that preheats), directly from the checkpoint, with MTP, and
at tensor parallel 2; compares token ids and logprobs as numbers; and reads from the counters what came from disk.
"""

import argparse
import tempfile
from pathlib import Path

from common import DEMO, FLOAT32, MODE, RESULTS, SEED_ENV, answers, equal, record, serving

PROMPTS, TOKENS = 6, 32
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
TP2 = ("--tensor-parallel-size", "2")
TP2_ENV = {**SEED_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def run(name: str, logs: Path, *options: str, vllm: tuple[str, ...] = (), env: dict[str, str] = SEED_ENV, cache: Path) -> dict:
    """One server: cold answers, then warm ones; and its counters."""
    options = (*options, "--cache-dir", str(cache))
    with serving.moet(DEMO, *options, log=logs / f"{name}.log", vllm=(*FLOAT32, *vllm), env=env) as server:
        cold = answers(server, PROMPTS, TOKENS)
        after_cold = server.metrics()
        warm = answers(server, PROMPTS, TOKENS)
        result = {"cold": cold, "warm": warm, "after_cold": after_cold, "metrics": server.metrics()}
    reads = result["metrics"].get("moet:disk_read_bytes_total", 0)
    print(f"{name}: cold == warm {equal(cold, warm)}; {reads / 2**20:.1f} MiB read", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for identity-PRECISION.json")
    parser.add_argument("--precision", nargs="+", default=["base", "native"])
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="moet-identity-"))
    for precision in options.precision:
        claims, runs = [], {}
        for ram in ("5%", "25%", "100%"):
            cache = work / f"cache-{precision}"
            runs[ram] = run(f"{precision}-{ram}", work, "--precision", precision, "--ram", ram, cache=cache)
        runs["restart"] = run(f"{precision}-restart", work, "--precision", precision, "--ram", "25%", cache=cache)
        runs["direct"] = run(f"{precision}-direct", work, "--precision", precision, "--ram", "100%", "--direct", cache=cache)
        whole = runs["100%"]["cold"]
        same = {name: equal(whole, r["cold"]) and equal(whole, r["warm"]) for name, r in runs.items()}
        for ram in ("5%", "25%"):
            name = f"{precision}-mtp-{ram}"
            runs[f"mtp-{ram}"] = run(name, work, "--precision", precision, "--ram", ram, vllm=MTP, cache=cache)
        for ram in ("6%", "25%"):  # half of 5 % is a little under the six slots that a rank wants for rows of two sizes
            name = f"{precision}-tp2-{ram}"
            runs[f"tp2-{ram}"] = run(name, work, "--precision", precision, "--ram", ram, vllm=TP2, env=TP2_ENV, cache=cache)
        ids = [a["token_ids"] for a in whole]
        same["mtp: arenas agree"] = equal(runs["mtp-5%"]["cold"], runs["mtp-25%"]["cold"])
        same["mtp: text of plain decoding"] = [a["token_ids"] for a in runs["mtp-25%"]["cold"]] == ids
        same["tp2: arenas agree"] = equal(runs["tp2-6%"]["cold"], runs["tp2-25%"]["cold"])
        same["tp2: text of tp1"] = [a["token_ids"] for a in runs["tp2-25%"]["cold"]] == ids
        what = f"`{precision}`: runs whose token ids and logprobs equal those of the fully resident one (arenas, cold, warm, restart, direct, MTP, TP 2)"
        claims.append(record.Claim("M1" + {"base": "a", "native": "b"}[precision], what, sum(same.values()), f"of {len(same)}", len(same), "=="))
        m = runs["25%"]["metrics"]
        use = m["moet:arena_mapped_bytes"] / m["moet:arena_budget_bytes"]
        what = f"`{precision}`: distance of the mapped arena from its budget, at 25 %"
        claims.append(record.Claim("M5" + {"base": "a", "native": "b"}[precision], what, round(abs(use - 1), 4), "", 0.1, "<="))
        samples = {
            "same": same,
            "metrics": {name: {k: v for k, v in r["metrics"].items() if "bucket" not in k} for name, r in runs.items()},
            "texts": [a["text"] for a in whole],
        }
        print(same, flush=True)
        record.write(options.out / f"identity-{precision}.json", claims, samples, mode=MODE, prompts=PROMPTS, tokens=TOKENS)


if __name__ == "__main__":
    main()
