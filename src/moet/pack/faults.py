"""What verify finds, each fault with the file, layer and expert it is in."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["manifest", "header", "row", "row file", "file"]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    kind    manifest (moet.json), header or row of a row file, row file (missing or of a wrong size as a
            whole), file (any other)
    layer, expert   where it is, if it is in rows; rows: "base" or "native"
    """

    kind: Kind
    file: str
    problem: str
    layer: int | None = None
    expert: int | None = None
    rows: str = ""

    def __str__(self) -> str:
        where = self.file
        if self.layer is not None:
            where += f", layer {self.layer}"
        if self.expert is not None:
            where += f", expert {self.expert}"
        return f"{where}: {self.problem}"


@dataclass(frozen=True)
class Verdict:
    """`warnings` are files that the pack does not know (a README may be added). `bytes` were read in
    `seconds`."""

    faults: tuple[Fault, ...]
    warnings: tuple[str, ...]
    bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.faults
