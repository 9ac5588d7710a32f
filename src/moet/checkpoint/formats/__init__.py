"""Native formats, one file each. A format is told by the dtypes of a matrix's tensors alone: lists of ignored
modules are not reliable
(nvidia/GLM-5.2-NVFP4 does not list its routers, which are not quantized)."""

from types import ModuleType

from moet.checkpoint.formats import bf16, fp8, mxfp4, nvfp4
from moet.checkpoint.parts import Parts

FORMATS: tuple[ModuleType, ...] = (mxfp4, nvfp4, fp8, bf16)


def detect(parts: Parts) -> ModuleType:
    """The format's module: `check(parts) -> name`, `build(parts, raw) -> Matrix`. Raises CheckpointError with
    the known forms."""
    roles = set(parts.pieces) - {"input", "bias"}
    for module in FORMATS:
        if roles in module.ROLES and all(parts.dtype(role) in module.DTYPES[role] for role in roles):
            return module
    found = ", ".join(
        f"{p.info.name.rsplit('.', 1)[-1]} {p.info.dtype} {list(p.info.shape)}" for p in parts.pieces.values()
    )
    known = "; ".join(
        " + ".join(f"{role} {'/'.join(module.DTYPES[role])}" for role in sorted(roles))
        for module in FORMATS
        for roles in module.ROLES
    )
    raise parts.pieces["codes"].wrong(f"a known format ({known})", found)
