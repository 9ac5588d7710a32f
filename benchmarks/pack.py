"""Packing a large checkpoint: peak memory of the process (M3) and bytes of MXFP4 source a second (M4).
Writes docs/results/pack.json.

    python benchmarks/pack.py --folder /tmp/pack-bench --target /dev/shm/pack-bench

The checkpoint has DeepSeek-V4-Flash's layout and sizes of an expert (hidden 4096, inter 2048), random codes,
128 experts a layer, as many layers as --gb asks for. It is read into the page cache before every run, the pack
goes to a tmpfs, and every run is a process of its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from record import ROOT, Claim, write

HIDDEN, INTER, EXPERTS, VOCAB = 4096, 2048, 128, 8192
GB = 10**9
MEASURED = """
import json, sys
from pathlib import Path
from moet.checkpoint import LocalSource
if sys.argv[1] == "pack":
    from moet.pack.packer import pack
    done = pack(LocalSource(Path(sys.argv[2])), Path(sys.argv[3]), native=sys.argv[4] == "native")
    found = {"seconds": done.seconds, "source_bytes": done.packed_bytes, "base_bits":
    done.manifest.report.base_bits}
else:
    from moet.pack.verify import verify
    done = verify(Path(sys.argv[3]))
    assert done.ok, done.faults
    found = {"seconds": done.seconds, "bytes": done.bytes}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(found | {"peak_kib": int(status["VmHWM"].split()[0]), "torch": "torch" in sys.modules}))
"""


def expert_tensors(layer: int, expert: int) -> list[tuple[str, str, list[int]]]:
    tensors = []
    for name, rows, cols in (("w1", INTER, HIDDEN), ("w2", HIDDEN, INTER), ("w3", INTER, HIDDEN)):
        stem = f"layers.{layer}.ffn.experts.{expert}.{name}"
        tensors += [
            (f"{stem}.scale", "F8_E8M0", [rows, cols // 32]),
            (f"{stem}.weight", "I8", [rows, cols // 2]),
        ]
    return tensors


def dense_tensors(layer: int) -> list[tuple[str, str, list[int]]]:
    p = f"layers.{layer}"
    return [
        (f"{p}.attn_norm.weight", "BF16", [HIDDEN]), (f"{p}.ffn_norm.weight", "BF16", [HIDDEN]),
        (f"{p}.ffn.gate.weight", "BF16", [EXPERTS, HIDDEN]), (f"{p}.ffn.gate.bias", "F32", [EXPERTS]),
    ]  # fmt: skip


def write_shard(path: Path, tensors: list[tuple[str, str, list[int]]], rng: np.random.Generator) -> int:
    """Random codes, scales of 2^-12 to 2^-6, everything else small BF16 or zero. Returns bytes of experts."""
    size = {"I8": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}
    header, offset, experts = {}, 0, 0
    for name, dtype, shape in tensors:
        count = int(np.prod(shape)) * size[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
        experts += count * (".experts." in name)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = rng.integers(0, 256, 64 << 20, np.uint8).tobytes()
    scales = rng.integers(115, 122, 1 << 20, np.uint8).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dtype, shape in tensors:
            count = int(np.prod(shape)) * size[dtype]
            if dtype == "I8":
                start = int(rng.integers(0, len(pool) - count))
                file.write(memoryview(pool)[start : start + count])
            elif dtype == "F8_E8M0":
                file.write(scales[:count])
            else:
                file.write(bytes(count))
    return experts


def make_checkpoint(folder: Path, gb: float) -> None:
    """About `gb` GB of experts, a shard a layer. Does nothing if the folder has one already."""
    each = sum(int(np.prod(shape)) for _, _, shape in expert_tensors(0, 0))
    layers = max(1, round(gb * GB / (EXPERTS * each)))
    if (folder / "done").exists() and (folder / "done").read_text() == str(layers):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    where = {}
    for layer in range(layers):
        tensors = dense_tensors(layer) + [t for e in range(EXPERTS) for t in expert_tensors(layer, e)]
        if layer == 0:
            tensors += [
                ("embed.weight", "BF16", [VOCAB, HIDDEN]),
                ("head.weight", "BF16", [VOCAB, HIDDEN]),
                ("norm.weight", "BF16", [HIDDEN]),
            ]
        shard = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        write_shard(folder / shard, tensors, rng)
        where |= {name: shard for name, _, _ in tensors}
    config = dict(
        architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", hidden_size=HIDDEN, moe_intermediate_size=INTER, num_hidden_layers=layers,
        n_routed_experts=EXPERTS, num_experts_per_tok=6, num_hash_layers=0, num_nextn_predict_layers=0, swiglu_limit=10.0, hidden_act="silu",
        vocab_size=VOCAB, expert_dtype="fp4", quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], scale_fmt="ue8m0"),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "done").write_text(str(layers))


def warm(folder: Path) -> int:
    """Reads all shards into the page cache; returns their bytes."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := len(file.read(16 << 20)):
                total += count
    return total


def run(what: str, source: Path, target: Path, mode: str = "base") -> dict:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-c", MEASURED, what, str(source), str(target), mode]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is made (and kept)")
    parser.add_argument(
        "--target",
        type=Path,
        required=True,
        help="where the packs go: a folder on a tmpfs; deleted afterwards",
    )
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--native", action="store_true", help="also one run with native rows (needs twice the room)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "pack.json")
    options = parser.parse_args()
    make_checkpoint(options.folder, options.gb)
    packs, verifies = [], []
    for i in range(options.runs):
        shutil.rmtree(options.target, ignore_errors=True)
        size = warm(options.folder)
        packs.append(run("pack", options.folder, options.target))
        print(
            f"pack {i}: {packs[-1]['source_bytes'] / packs[-1]['seconds'] / GB:.2f} GB/s, peak {packs[-1]['peak_kib'] / 1024:.0f} MiB",
            flush=True,
        )
        verifies.append(run("verify", options.folder, options.target))
        print(f"verify {i}: {verifies[-1]['bytes'] / verifies[-1]['seconds'] / GB:.2f} GB/s", flush=True)
    samples = {"source_bytes": size, "pack": packs, "verify": verifies}
    if options.native:
        shutil.rmtree(options.target, ignore_errors=True)
        warm(options.folder)
        samples["pack_native"] = [run("pack", options.folder, options.target, "native")]
    shutil.rmtree(options.target, ignore_errors=True)
    rate = statistics.median(p["source_bytes"] / p["seconds"] / GB for p in packs)
    verify_rate = statistics.median(v["bytes"] / v["seconds"] / GB for v in verifies)
    peak = max(p["peak_kib"] for p in packs + samples.get("pack_native", [])) / (1 << 20)
    claims = [
        Claim("M3", f"peak memory (VmHWM) of packing a checkpoint of {size / GB:.1f} GB", round(peak, 3), "GiB", 1.0, "<="),
        Claim(
            "M4",
            "MXFP4 source packed per second, from page cache to tmpfs, median",
            round(rate, 3),
            "GB/s",
            1.0,
            ">=",
        ),
        Claim(
            "M4.verify",
            "pack verified per second, from tmpfs, median",
            round(verify_rate, 3),
            "GB/s",
            2.0,
            ">=",
        ),
    ]
    write(
        options.out,
        claims,
        samples,
        mode="base rows, no native rows" + (" (one run with)" if options.native else ""),
    )
    for claim in claims:
        print(
            f"{claim.id}: {claim.what}: {claim.value} {claim.unit} (target {claim.sense} {claim.target}): {'held' if claim.held else 'NOT held'}"
        )


if __name__ == "__main__":
    main()
