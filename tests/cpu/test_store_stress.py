"""The store's native code under ThreadSanitizer and AddressSanitizer, driven by store_stress.cpp."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_rows import random_rows

from moet.layout import RowGeometry

ROOT = Path(__file__).parents[2]
TESTED = [p for p in sorted((ROOT / "native/store").glob("*.cpp")) if not p.stem.endswith("abi")]
BESIDE = [
    *sorted((ROOT / "native/common").glob("*.cpp")),
    *sorted((ROOT / "native/layout").glob("*.cpp")),
]  # called, but not what is tested here


def build(
    folder: Path, sanitizer: str | None, program: str = "store_stress.cpp", flags: Sequence[str] = ()
) -> Path | None:
    """The stress program, or None where this compiler or kernel cannot run that sanitizer. ThreadSanitizer does not know fences
    (-Wtsan): what they order is copied by functions it leaves alone."""
    instrument = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-Wno-tsan"] if sanitizer else []
    (folder / "probe.cpp").write_text("int main() { return 0; }")
    probe = subprocess.run(
        ["g++", *instrument, folder / "probe.cpp", "-o", folder / "probe"], capture_output=True
    )
    if probe.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        return None

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        how = ["-O0"] if source in BESIDE else ["-O1", "-g", *instrument, *flags]
        subprocess.run(["g++", "-std=c++17", "-c", *how, source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [ROOT / "tests/cpu" / program, *TESTED, *BESIDE]))
    subprocess.run(["g++", "-pthread", *instrument, *objects, "-o", folder / "stress"], check=True)
    return folder / "stress"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_stress(tmp_path, sanitizer):
    program = build(tmp_path, sanitizer)
    if program is None:
        pytest.skip(f"this compiler or kernel cannot run -fsanitize={sanitizer}")
    geometry, layers, experts = RowGeometry("sym2", 64, 96, False), 3, 16
    path = tmp_path / "rows"
    path.write_bytes(random_rows(geometry, layers * experts).tobytes())
    for slots, seed in ((4, 1), (9, 2), (24, 3), (48, 4)):
        run = subprocess.run(
            [program, path, *map(str, (layers, experts, geometry.hidden, geometry.inter, slots, 400, seed))],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr[-4000:]
        words = run.stdout.split()
        checked, failed, waves = int(words[1]), int(words[3]), int(words[5])
        assert checked > 1000
        if slots < layers * experts:  # with room for all, a fault meets no read
            assert failed > 0 and waves > 0
