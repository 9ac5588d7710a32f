"""The tensors of one matrix of one expert, and how to cut them out where a tensor holds more than that."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moet.checkpoint.names import Role
from moet.checkpoint.reader import Span
from moet.checkpoint.safetensors import TensorInfo
from moet.errors import CheckpointError
from moet.numerics import decode_ue8m0, ue8m0_has_nan, widen_bf16, widen_f16

FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Piece:
    """One expert's part of a tensor. shape: of that part, so without the experts' dimension where all experts
    are in one tensor."""

    info: TensorInfo
    span: Span
    shape: tuple[int, ...]

    def wrong(self, expected: str, found: object = None) -> CheckpointError:
        found = f"{self.info.dtype} {list(self.info.shape)}" if found is None else found
        return CheckpointError(
            f"{self.info.file}, tensor {self.info.name}: expected {expected}, found {found}"
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """A matrix: `rows` by `cols` once it is cut out.

    stored      rows in the tensors: twice `rows` where gate and up are fused
    select      which of the stored rows are this matrix's
    transposed  tensors hold [cols, stored], and the scales' columns come first too; MXFP4's `_blocks` never
                are
    """

    pieces: Mapping[Role, Piece]
    rows: int
    cols: int
    stored: int
    select: slice
    transposed: bool = False

    def dtype(self, role: Role) -> str:
        """safetensors' dtype of a part, "" if there is none."""
        return self.pieces[role].info.dtype if role in self.pieces else ""

    def bytes_of(
        self,
        role: Role,
        raw: Mapping[Span, np.ndarray],
        columns: int,
        item: int = 1,
        transposed: bool = False,
    ) -> np.ndarray:
        """uint8 [rows, columns]: this matrix's rows of a part whose rows are `columns` bytes, in items of 1
        or 2 bytes.
        transposed: it is stored as [columns / item, stored rows]."""
        items = raw[self.pieces[role].span].view(f"<u{item}")
        items = items.reshape(-1, self.stored).T if transposed else items.reshape(self.stored, -1)
        return np.ascontiguousarray(items[self.select]).view(np.uint8).reshape(self.rows, columns)

    def floats(self, role: Role, raw: Mapping[Span, np.ndarray]) -> np.ndarray:
        """float32, flat: all values of a part, widened exactly. Raises CheckpointError for one that is not
        finite."""
        piece = self.pieces[role]
        data, dtype = raw[piece.span], piece.info.dtype
        if dtype == "F32":
            values = np.frombuffer(data.tobytes(), "<f4")
        elif dtype == "BF16":
            values = widen_bf16(np.frombuffer(data.tobytes(), "<u2"))
        elif dtype == "F16":
            values = widen_f16(np.frombuffer(data.tobytes(), "<u2"))
        elif dtype == "F8_E8M0":
            if ue8m0_has_nan(data):
                raise piece.wrong(
                    "scales that are numbers",
                    f"NaN (byte 255) at {int(np.argmax(data == 255))} of its {data.size} values",
                )
            values = decode_ue8m0(data, np.float32)
        else:
            raise piece.wrong(f"one of {', '.join(FLOATS)}, F8_E8M0")
        finite = np.isfinite(values)
        if not finite.all():
            at = int(np.argmin(finite))
            raise piece.wrong("finite values", f"{values[at]} at {at} of its {values.size} values")
        return values

    def bias(self, raw: Mapping[Span, np.ndarray]) -> np.ndarray | None:
        """float32 [rows], or None if the matrix has none."""
        return np.ascontiguousarray(self.floats("bias", raw)[self.select]) if "bias" in self.pieces else None

    def expect_rows(self, role: Role, columns: int) -> None:
        """Raises CheckpointError if a part is not [stored, columns], or the other way round if the matrix is
        transposed."""
        self.expect_shape(role, (columns, self.stored) if self.transposed else (self.stored, columns))

    def expect_shape(self, role: Role, *shapes: tuple[int, ...]) -> None:
        piece = self.pieces[role]
        if piece.shape not in shapes:
            per = "" if piece.shape == piece.info.shape else " for each expert"
            raise piece.wrong(f"{' or '.join(str(list(s)) for s in shapes)}{per}")
