"""What the tests of packing share: small checkpoints, and a folder's bytes to compare."""

import hashlib
import shutil
from pathlib import Path

from moet.checkpoint import LocalSource
from moet.pack.packer import Outcome, pack
from tests.generators import write_deepseek_v4, write_glm_moe_dsa, write_gpt_oss, write_kimi_k2, write_mixtral, write_qwen3_moe

SOURCES = {
    "mxfp4": lambda out: write_deepseek_v4(out),
    "nvfp4": lambda out: write_kimi_k2(out, scheme="nvfp4_modelopt"),
    "nvfp4, MTP layer in bf16": lambda out: write_glm_moe_dsa(out, scheme="nvfp4_modelopt"),
    "fp8": lambda out: write_qwen3_moe(out, scheme="fp8_block_bf16"),
    "fp8_row": lambda out: write_qwen3_moe(out, scheme="fp8_channel_compressed"),
    "bf16": lambda out: write_mixtral(out, scheme="bf16"),
    "mxfp4 with biases": lambda out: write_gpt_oss(out),
}
"""A checkpoint of each native format."""


def pack_local(src: Path, dst: Path, **options) -> Outcome:
    return pack(LocalSource(src), dst, **options)


def contents(root: Path) -> dict[str, str]:
    """Digest of every file under a folder."""
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def copy(src: Path, dst: Path) -> Path:
    shutil.copytree(src, dst)
    return dst
