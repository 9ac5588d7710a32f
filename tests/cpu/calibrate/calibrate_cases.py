"""What the tests of calibration share: tiny models, packed with an encoder of a few hundred tokens."""

from pathlib import Path

import torch

from moet.calibrate.device import Device
from moet.calibrate.encoder import CalibratedEncoder
from moet.calibrate.tokens import Windows
from moet.checkpoint import LocalSource
from moet.pack.packer import Outcome, pack
from moet.quantize.schemes import scheme
from tests import generators as g

SOURCES = {
    "mixtral": lambda out: g.write_mixtral(out, layers=3, hidden=64, inter=96, experts=4),
    "glm-5.2, dense layer first, carry, MTP": lambda out: g.write_glm_moe_dsa(out, scheme="fp8_block"),
    "v4, four streams, clamp": lambda out: g.write_deepseek_v4(out),
    "gpt-oss, biases": lambda out: g.write_gpt_oss(out),
}


def some_windows(count: int = 6, length: int = 32, seed: int = 0) -> Windows:
    random = torch.Generator().manual_seed(seed)
    return Windows(torch.randint(3, 1000, (count, length), generator=random), {"random": count})


def encoder(windows: Windows | None = None, name: str = "sym2-gptq") -> CalibratedEncoder:
    return CalibratedEncoder(scheme(name), windows or some_windows(), Device("cpu"))


def pack_calibrated(src: Path, dst: Path, *, using: CalibratedEncoder | None = None, **options) -> Outcome:
    return pack(LocalSource(src), dst, encoder=using or encoder(), **options)
