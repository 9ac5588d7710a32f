"""A calibrated encoder from what a command line says."""

from collections.abc import Sequence
from pathlib import Path

from moet.calibrate.encoder import CalibratedEncoder, Device
from moet.calibrate.tokens import TOKENS, default_texts, read_file, windows
from moet.checkpoint.index import read_json
from moet.models import family_of
from moet.models.registry import text_config
from moet.quantize import schemes


def open_encoder(
    root: Path, scheme: str, files: Sequence[Path] = (), tokens: int = TOKENS, device: str = "auto"
) -> CalibratedEncoder:
    """root: the checkpoint's folder, of which config.json and the tokenizer are read. files: texts instead of those that
    come with moet, each a kind of its own.

    Raises CheckpointError (no tokenizer, unknown architecture), ConfigError (scheme, files, device).
    """
    chosen = Device.chosen(device)
    config = read_json(root / "config.json")
    positions = text_config(config, family_of(config)[1]).get("max_position_embeddings")
    texts = {str(file): read_file(file) for file in files} or default_texts()
    found = windows(
        root, texts, tokens, positions if isinstance(positions, int) and positions > 0 else 1 << 30
    )
    return CalibratedEncoder(schemes.scheme(scheme), found, chosen)
