"""What clients see of moet: the mode in /v1/models, `moet:` in /metrics, and the reason of a failed request."""

import functools
from typing import Any

from moet.engine.vllm import compat, metrics
from moet.engine.vllm.failure import Words
from moet.errors import EngineError


@functools.cache
def install() -> None:
    """Called in each API server process. Raises EngineError if vLLM's front end is not as recorded."""
    compat.check("http")
    _models()
    _errors()
    metrics.install()


def mode() -> dict[str, Any]:
    """What answers are made of: the card of the newest run of this process. What its ranks say is left out where their files are gone."""
    from moet.engine.vllm.entry import RUNS

    run = RUNS[-1]
    info = next((rank["info"] for rank in metrics.read(run)), {})
    said = {name: info[name] for name in ("activations", "row_format", "scheme") if name in info}
    return {"precision": run.settings.precision, "experts": "pack" if run.packed else "encoded at start"} | said


def _models() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry

    original = OpenAIModelRegistry.show_available_models

    @functools.wraps(original)
    async def show_available_models(self: Any) -> Any:
        models = await original(self)
        for card in models.data:
            card.moet = mode()  # OpenAI's objects allow extra fields, and so do vLLM's
        return models

    OpenAIModelRegistry.show_available_models = show_available_models


def _errors() -> None:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError

    original = GenerateBaseServing._raise_if_error

    @functools.wraps(original)
    def _raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        reason = last_failure() if finish_reason == "error" else ""
        if reason:
            raise GenerationError(f"an expert could not be read, so this request was stopped: {reason}")
        original(self, finish_reason, request_id)

    GenerateBaseServing._raise_if_error = _raise_if_error


def last_failure() -> str:
    from moet.engine.vllm.entry import RUNS

    try:
        return Words(RUNS[-1].run_dir).last()
    except EngineError:  # the folder was cleaned
        return ""
