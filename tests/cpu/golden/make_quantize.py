"""Writes quantize.json beside itself: matrices of hard blocks and their 2-bit codes, from the float64 reference alone.

    PYTHONPATH=src:tests/cpu python tests/cpu/golden/make_quantize.py
"""

import json
from pathlib import Path

import numpy as np

from moet.quantize import reference
from quantize_cases import FORMATS, KINDS, hard_matrix

CASES = [(["random", *KINDS[4:]], "usual"), (list(KINDS), "mixed"), (["zeros", "equal", "largest", "threes"], "highest")]


def main() -> None:
    golden = []
    for format in FORMATS:
        for seed, (kinds, scale_kind) in enumerate(CASES):
            matrix = hard_matrix(100 + seed, format, 32, 32, kinds, scale_kind, multiplier=2.7e-4)
            encoded = reference.encode(matrix)
            scales = None if matrix.scales is None else {"dtype": matrix.scales.dtype.name, "hex": matrix.scales.tobytes().hex()}
            golden.append({
                "format": format, "rows": 32, "cols": 32, "kinds": kinds, "codes": matrix.codes.tobytes().hex(), "scales": scales,
                "multiplier": np.float32(matrix.multiplier).tobytes().hex(), "alternated": encoded.alternated,
                "sym2_codes": ["".join(map(str, row)) for row in encoded.codes], "sym2_scales": encoded.scales.tobytes().hex(),
            })  # fmt: skip
    path = Path(__file__).with_name("quantize.json")
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
