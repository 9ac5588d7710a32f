"""An encoder from what a command line says."""

from collections.abc import Sequence
from pathlib import Path

from moet.calibrate import TOKENS
from moet.calibrate.device import Device
from moet.calibrate.encoder import CalibratedEncoder
from moet.calibrate.rounding import RoundingEncoder
from moet.calibrate.tokens import default_texts, read_file, windows
from moet.checkpoint.index import read_json
from moet.errors import CheckpointError
from moet.models import family_of
from moet.models.registry import text_config
from moet.quantize import schemes


def open_encoder(
    root: Path, name: str, files: Sequence[Path] = (), tokens: int = TOKENS, device: str = "auto"
) -> CalibratedEncoder | RoundingEncoder:
    """name: of the scheme. root: the checkpoint's folder, of which config.json and the tokenizer are read. files:
    texts instead of those that come with moet, each a kind of its own.

    Raises CheckpointError (no tokenizer or another model's, unknown architecture), ConfigError (scheme, files, device).
    """
    chosen, scheme = Device.chosen(device), schemes.scheme(name)
    if not scheme.calibrated:
        return RoundingEncoder(scheme, chosen)
    config = read_json(root / "config.json")
    text = text_config(config, family_of(config)[1])
    positions, vocabulary = text.get("max_position_embeddings"), text.get("vocab_size")
    texts = {str(file): read_file(file) for file in files} or default_texts()
    found = windows(
        root, texts, tokens, positions if isinstance(positions, int) and positions > 0 else 1 << 30
    )
    if isinstance(vocabulary, int) and (largest := int(found.ids.max())) >= vocabulary:
        raise CheckpointError(
            f"{root}: expected a tokenizer of the {vocabulary} tokens that config.json says, found token {largest}; use the "
            "tokenizer that belongs to the model. `--no-calibrate` needs none"
        )
    return CalibratedEncoder(scheme, found, chosen)
