"""What clients see of moet: the mode in /v1/models, `moet:` in /metrics, and the reason of a failed request."""

import functools
from typing import Any

from moet.engine.vllm import compat, metrics
from moet.engine.vllm.failure import Words


@functools.cache
def install() -> None:
    """Called in each API server process. Raises EngineError if vLLM's front end is not as recorded."""
    compat.check("http")
    _models()
    _errors()
    metrics.install()


def mode() -> dict[str, Any]:
    """What answers are made of: the card of the newest run of this process, whose ranks have started."""
    from moet.engine.vllm.entry import RUNS

    run = RUNS[-1]
    info = metrics.read(run)[0]["info"]
    return {
        "precision": run.settings.precision,
        "activations": info["activations"],
        "experts": "pack" if run.packed else "encoded at start",
        "row_format": info["row_format"],
        "scheme": info["scheme"],
    }


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

    return Words(RUNS[-1].run_dir).last()
