"""The table of architectures: packs, verifies, compares and serves every row, and writes docs/results/architectures.json.

python scripts/architectures.py              all rows (about 20 minutes on two cores), then docs/architectures.md
python scripts/architectures.py ID ...       these rows anew; the others stay as they are in the JSON
python scripts/architectures.py --render     docs/architectures.md from the JSON
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import record
from benchmarks.record import Claim
from tests.e2e.arch import serve, table
from tests.e2e.arch.compare import pack_and_compare
from tests.e2e.arch.rows import ROWS, TOLERANCE, TOLERANCE_FP8, Row


def run_rows(rows: list[Row], work: Path) -> list[dict]:
    """All results of these rows. Everything that vLLM does happens in one process after all packs are made."""
    results, packs, references = [], {}, {}
    for row in rows:
        folder = work / row.id
        truth = row.make(folder / "checkpoint")
        compared = pack_and_compare(folder / "checkpoint", truth, folder / "pack")
        if not row.not_served:
            packs[row.id] = folder / "pack"
            references[row.id] = {
                "native": truth.write_dequantized(folder / "native32"),
                "base": truth.write_dequantized(folder / "base32", compared.base),
            }
        results.append(
            {
                "id": row.id,
                "model": row.model,
                "architecture": truth.config["architectures"][0],
                "format": row.format,
                "made_by": row.made_by,
                "layers": {str(k): v for k, v in compared.formats.items()},
                "experts": compared.experts,
                "matrices": compared.matrices,
                "wrong": len(compared.wrong),
                "what_differs": compared.wrong[:5],
                "verified": compared.verified,
                "base_error": compared.base_error,
                "not_served": row.not_served,
                "served": None,
            }
        )
        print(f"{row.id}: {compared.matrices} matrices, {len(compared.wrong)} differ", flush=True)
    answers = serve.serve(packs, work / "answers")
    for result in results:
        found = answers.get(result["id"])
        if isinstance(found, str):
            errors = [line for line in found.splitlines() if "Error" in line]
            result["not_served"] = f"failed: {errors[-1].split(']: ')[-1].strip() if errors else 'no answer'}"
        elif found:
            result["served"] = {}
            for precision, answer in found.items():
                folder, checkpoint = references[result["id"]][precision], work / result["id"] / "checkpoint"
                agreement = serve.compare(folder, answer, serve.fp8_inputs(checkpoint))
                tolerance = by_id(result["id"]).tolerance
                result["served"][precision] = asdict(agreement) | {
                    "tolerance": tolerance,
                    "held": agreement.holds(tolerance),
                }
            print(f"{result['id']}: {result['served']}", flush=True)
    return results


def claims(rows: list[dict]) -> list[Claim]:
    """What the table has to bring, each with its measured value."""
    answers = [answer for row in rows if row["served"] for answer in row["served"].values()]
    able = [row for row in rows if not by_id(row["id"]).not_served]
    matrices = sum(r["matrices"] for r in rows)
    worst = max((a["logprob"] for a in answers if a["tolerance"] == TOLERANCE), default=0.0)
    return [
        Claim(
            "A1",
            "rows of the table of architectures packed and verified",
            sum(r["verified"] for r in rows),
            "rows",
            len(ROWS),
            "==",
        ),
        Claim(
            "A2",
            "matrices that differ from the checkpoint's values or from an independent quantization",
            sum(r["wrong"] for r in rows),
            f"of {matrices}",
            0,
            "==",
        ),
        Claim(
            "A3",
            "rows served in base and native, of those that vLLM's CPU backend can run",
            sum(bool(r["served"]) for r in able),
            "rows",
            len(able),
            "==",
        ),
        Claim(
            "A4",
            "served answers, base and native, that transformers agrees with",
            sum(a["held"] for a in answers),
            "answers",
            2 * len(able),
            "==",
        ),
        Claim(
            "A5",
            "largest difference of a log-probability from transformers, rows with FP8 activations apart",
            worst,
            "nats",
            TOLERANCE,
            "<=",
        ),
    ]


def by_id(name: str) -> Row:
    return next(row for row in ROWS if row.id == name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--render", action="store_true")
    parser.add_argument(
        "--keep", type=Path, help="folder for checkpoints, packs and answers; answers in it are used again"
    )
    arguments = parser.parse_args()
    if not arguments.render:
        rows = [by_id(name) for name in arguments.ids] or list(ROWS)
        work = arguments.keep or Path(tempfile.mkdtemp(prefix="moet-architectures-"))
        for row in rows:
            shutil.rmtree(work / row.id, ignore_errors=True)
        old = (
            json.loads(table.RESULTS.read_text())["samples"]["rows"]
            if arguments.ids and table.RESULTS.exists()
            else []
        )
        new = {r["id"]: r for r in old} | {r["id"]: r for r in run_rows(rows, work)}
        if not arguments.keep:
            shutil.rmtree(work)
        ordered = [new[row.id] for row in ROWS if row.id in new]
        record.write(
            table.RESULTS,
            claims(ordered),
            {"rows": ordered},
            "base and native, fp32",
            ram_percent=serve.RAM_PERCENT,
            tolerance=TOLERANCE,
            tolerance_fp8=TOLERANCE_FP8,
            prompt_lengths=list(serve.LENGTHS),
            new_tokens=serve.NEW_TOKENS,
        )
    table.PAGE.write_text(table.render(json.loads(table.RESULTS.read_text())))
    for claim in json.loads(table.RESULTS.read_text())["claims"]:
        print(
            f"{claim['id']}: {claim['value']:g} {claim['unit']}, target {claim['sense']} {claim['target']:g}, {claim['held']}"
        )


if __name__ == "__main__":
    main()
