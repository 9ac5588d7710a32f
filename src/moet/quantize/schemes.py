"""The ways to choose 2-bit codes that a pack can name."""

from dataclasses import dataclass

from moet.errors import ConfigError


@dataclass(frozen=True)
class Scheme:
    """name: of the row format and of the method. calibrated: looks at what layers are given, not at weights alone."""

    row_format: str
    calibrated: bool

    @property
    def name(self) -> str:
        return f"{self.row_format}-{'gptq' if self.calibrated else 'rtn'}"


SCHEMES = {s.name: s for s in (Scheme("sym2", False), Scheme("sym2", True), Scheme("tcq2", False), Scheme("tcq2", True))}
"""rtn: every weight, or every group of weights, by itself. gptq: error feedback on calibration text."""
DEFAULT_SCHEME = "tcq2-gptq"
PLAIN_SCHEME = "sym2-rtn"
"""What is used without calibration."""


def scheme(name: str) -> Scheme:
    """Raises ConfigError that lists the schemes."""
    if name not in SCHEMES:
        raise ConfigError(f"scheme: expected one of {', '.join(SCHEMES)}, found {name!r}")
    return SCHEMES[name]
