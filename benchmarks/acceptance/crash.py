"""M2: packing the demo survives SIGKILL at random points, and no flipped byte of a pack goes unnoticed.

Kills `moet pack` 50 times at random points of its work, runs the same command again each time, and compares every byte with an undisturbed pack. Then flips 200
random bytes, one at a time, in files chosen at random: `verify` must find each, and where it is in an expert row, so must the read that brings the row in.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import DEMO, RESULTS, record

from moet.errors import StoreError
from moet.pack import Pack
from moet.pack.verify import verify
from moet.store import Pager


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def start(dst: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "moet", "pack", str(DEMO), str(dst), "--no-calibrate"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (dst / ".moet").exists() and process.poll() is None:  # from then on there is something to lose
        time.sleep(0.001)
    return process


def kills(work: Path, wanted: dict[str, bytes], length: float, count: int, rng: random.Random) -> tuple[int, int]:
    """(packs equal to the undisturbed one, runs that were over before the signal)."""
    equal = over = 0
    for _ in range(count):
        dst = work / "killed"
        process = start(dst)
        time.sleep(rng.random() * 0.9 * length)
        process.send_signal(signal.SIGKILL)
        over += process.wait() == 0
        equal += start(dst).wait() == 0 and contents(dst) == wanted
        shutil.rmtree(dst)
    return equal, over


def flips(pack: Path, count: int, rng: random.Random) -> tuple[int, int, int]:
    """(flips that verify found, flips in rows, of which the read found)."""
    opened = Pack.open(pack)
    rows = {r.path: (kind, i, r) for i, files in opened.layers.items() for kind in ("base", "native") for r in [files.rows(kind)]}
    files = sorted(p for p in pack.rglob("*") if p.is_file())
    found = in_rows = read_found = 0
    for _ in range(count):
        path = rng.choice(files)
        offset, mask = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, offset, mask)
        found += not verify(pack).ok
        if path in rows and offset >= rows[path][2].data_offset:
            kind, layer, r = rows[path]
            in_rows += 1
            pager = Pager.from_pack(opened, kind)
            try:
                pager.read(layer, (offset - r.data_offset) // r.geometry.row_bytes)
            except StoreError:
                read_found += 1
            pager.close()
        flip(path, offset, mask)
    assert verify(pack).ok, "the flips were not undone"
    return found, in_rows, read_found


def flip(path: Path, offset: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "crash.json")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--flips", type=int, default=200)
    options = parser.parse_args()
    work, rng = Path(tempfile.mkdtemp(prefix="moet-crash-")), random.Random(0)
    process = start(work / "whole")
    began = time.monotonic()
    assert process.wait() == 0
    length, wanted = time.monotonic() - began, contents(work / "whole")
    equal, over = kills(work, wanted, length, options.kills, rng)
    print(f"{equal} of {options.kills} packs equal; {over} runs were over before the signal", flush=True)
    found, in_rows, read_found = flips(work / "whole", options.flips, rng)
    claims = [
        record.Claim("M2a", "packs byte-equal to an undisturbed one after SIGKILL at a random point and a rerun", equal, f"of {options.kills}", options.kills, "=="),
        record.Claim("M2b", "random flipped bytes of a pack found by `verify`", found, f"of {options.flips}", options.flips, "=="),
        record.Claim("M2c", "those in expert rows found by the read that brings the row in", read_found, f"of {in_rows}", in_rows, "=="),
    ]  # fmt: skip
    record.write(options.out, claims, {"over_before_the_signal": over, "seconds_of_a_run": length}, mode="base and native rows of the demo")
    for c in claims:
        print(c.id, c.what, c.value, c.unit, "held" if c.held else "NOT HELD")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
