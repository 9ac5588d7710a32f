"""cuobjdump: machine code to text. It comes with the CUDA toolkit and with Triton's package."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

TOOLKIT = Path("/usr/local/cuda/bin/cuobjdump")


def cuobjdump() -> Path:
    """Raises FileNotFoundError that says where it was looked for."""
    spec = importlib.util.find_spec("triton")
    beside = [Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump" for folder in (spec.submodule_search_locations or [])] if spec else []
    on_path = shutil.which("cuobjdump")
    for path in [Path(on_path)] if on_path else [TOOLKIT, *beside]:
        if path.exists():
            return path
    raise FileNotFoundError(
        f"cuobjdump: expected it on PATH, at {TOOLKIT} or in the package triton, found none. Install the CUDA toolkit or pip install triton, or name it with --cuobjdump"
    )


def dump(tool: Path, cubin: bytes) -> tuple[str, dict[str, dict[str, int]]]:
    """SASS, and kernel -> {"registers", "stack", "shared"}: bytes a thread and a block, static."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda *options: subprocess.run([str(tool), *options, file.name], capture_output=True, text=True, check=True).stdout
        return run("-sass"), resources(run("-res-usage"))


def resources(text: str) -> dict[str, dict[str, int]]:
    """Of what `cuobjdump -res-usage` prints."""
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: {"registers": int(r), "stack": int(s), "shared": int(m)} for name, r, s, m in found}
