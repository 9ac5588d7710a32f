"""The heat file: which experts were used, kept between runs so that the next one starts warm."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FORMAT = 1


def save_heat(path: Path | str, fingerprint: str, precision: str, heat: Mapping[int, np.ndarray]) -> None:
    """Writes heat (uint32 [experts] of each layer) as JSON; it appears complete or not at all (temporary
    name, fsync, rename)."""
    path = Path(path)
    document = {
        "format": FORMAT, "fingerprint": fingerprint, "precision": precision,
        "layers": {str(layer): [int(h) for h in values] for layer, values in heat.items()},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as f:
            json.dump(document, f, separators=(",", ":"))
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_heat(
    path: Path | str, fingerprint: str, precision: str, experts: Mapping[int, int]
) -> dict[int, np.ndarray] | None:
    """Heat of each layer, or None where there is no file, or, with a warning, where it is damaged or of
    another pack or precision.

    experts: layer -> number of experts; a file with other layers or numbers is not this pack's. Heat only
    decides what is read first, so a bad file costs a cold start and never an error.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text())
        for name, expected in (("format", FORMAT), ("fingerprint", fingerprint), ("precision", precision)):
            if document[name] != expected:
                raise ValueError(f"expected {name} {expected!r}, found {document[name]!r}")
        heat = {int(layer): np.array(values, np.uint32) for layer, values in document["layers"].items()}
        found, expected = (
            {layer: values.shape for layer, values in heat.items()},
            {layer: (n,) for layer, n in experts.items()},
        )
        if found != expected:
            total = sum(experts.values())
            raise ValueError(
                f"expected heat of {len(expected)} layers with {total} experts, found other ones"
            )
        return heat
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        warnings.warn(f"heat file {path} is ignored: {e}. Starting cold", RuntimeWarning, stacklevel=2)
        return None
