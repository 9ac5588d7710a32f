"""Calibrated schemes by name."""

from moet.calibrate.layer import Solver
from moet.calibrate.plain import encode_matrix
from moet.errors import ConfigError

SOLVERS: dict[str, Solver] = {"sym2-gptq": encode_matrix}


def solver_of(scheme: str) -> Solver:
    """Raises ConfigError that lists the schemes."""
    if scheme not in SOLVERS:
        raise ConfigError(f"scheme: expected one of {', '.join(SOLVERS)}, found {scheme}")
    return SOLVERS[scheme]
