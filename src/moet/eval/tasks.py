"""Standard tasks by lm-eval against a server, as one result with every document's outcome."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet.errors import EvalError
from moet.eval import result, stats
from moet.eval.server import Server
from moet.eval.tokens import FolderTokenizer

KEPT = ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash", "target", "resps", "filtered_resps")


def run(
    url: str, tasks: Sequence[str], *, chat: bool, limit: int | None, num_fewshot: int | None, concurrent: int, include: Path | None, tokenizer: str, model: str, loss: float,
    key: str = "",
) -> dict[str, Any]:
    """`lm_eval.simple_evaluate` with model type local-completions, or local-chat-completions for `chat`.

    Raises EvalError: an unknown task, or whatever lm-eval finds wrong with the task, the data set or the server.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if include and not include.is_dir():
        raise EvalError(f"--include {include}: expected a folder with tasks, found {'a file' if include.exists() else 'none'}")
    if not tasks:
        raise EvalError("--tasks: expected at least one name, found none")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    server = Server(url, tokenizer=tokenizer, model=model, key=key)
    card = server.card
    manager = TaskManager(include_path=str(include) if include else None)
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown:
        raise EvalError(f"--tasks: expected names that lm-eval {lm_eval.__version__} knows, found {', '.join(unknown)}; --include FOLDER adds your own")
    arguments: dict[str, Any] = {
        "model": server.model, "base_url": f"{server.url}/v1/{'chat/' if chat else ''}completions", "num_concurrent": concurrent, "max_retries": 3, "timeout": 1800,
        "max_length": card.details.get("max_model_len") or 2048,
    }  # fmt: skip
    if not chat:
        here = isinstance(server.tokenizer, FolderTokenizer)
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": tokenizer or str(server.folder)} if here else {"tokenizer_backend": "remote"}
    if key:
        arguments["auth_token"] = key
    kind = "local-chat-completions" if chat else "local-completions"
    server.close()
    try:
        found = lm_eval.simple_evaluate(
            model=kind, model_args=arguments, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot, apply_chat_template=chat, log_samples=True,
            bootstrap_iters=1000,
        )  # fmt: skip
    except Exception as e:  # tasks are programs, and a server that dies half-way shows as whatever its client raises
        raise EvalError(f"lm-eval, {', '.join(tasks)}: expected results, found: {type(e).__name__}: {str(e)[:500]}") from e
    samples = {task: [_sample(s) for s in rows] for task, rows in found["samples"].items()}
    scores = {task: _scores(values, found["n-samples"].get(task, {}).get("effective", len(samples.get(task, ())))) for task, values in found["results"].items()}
    power = [words for task, rows in samples.items() for words in _power(task, rows, loss)]
    return {
        "kind": "tasks", **result.provenance(), "mode": card.mode, "candidate": card.as_dict(),
        "parameters": {"tasks": list(tasks), "chat": chat, "limit": limit, "num_fewshot": num_fewshot, "lm_eval_model": kind, "loss": loss},
        "versions_of_tasks": found["versions"], "fewshot": found.get("n-shot", {}), "tasks": scores, "power": power,
        "claims": [
            result.claim(f"task.{task}.{metric}", f"{task}, {metric}", m["value"], "", None, ">=") for task, metrics in scores.items() for metric, m in metrics.items()
        ],
        "samples": samples,
    }  # fmt: skip


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Hashes stand for document and prompt, which lm-eval and the task's version reproduce; the metrics' numbers are under their names."""
    kept = {k: sample[k] for k in KEPT if k in sample}
    metrics = {m: value for m in sample.get("metrics", ()) if (value := number(sample.get(m))) is not None}
    return {**_json(kept), "scores": metrics}


def number(value: Any) -> float | None:
    """A metric of one document as a number; None where it is something to be aggregated later, like (log-probability, bytes)."""
    if isinstance(value, bool | int | float) or hasattr(value, "item"):
        return float(value)
    return None


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _scores(values: dict[str, Any], documents: int) -> dict[str, dict[str, Any]]:
    """lm-eval's "METRIC,FILTER" keys; stderr None where it has none."""
    found = {}
    for key, value in values.items():
        metric, comma, filter_ = key.partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{filter_}")
            name = metric if filter_ == "none" else f"{metric}, {filter_}"
            found[name] = {"value": float(value), "stderr": float(error) if isinstance(error, int | float) else None, "documents": documents}
    return found


ASSUMED = 0.1
"""Share of documents whose outcome differs between the two models, where only one was measured. Of a quantized and its original model, seldom more than that."""


def _power(task: str, rows: list[dict[str, Any]], loss: float) -> list[str]:
    """What a paired comparison of this many documents could find, if a tenth of the outcomes differed; only where outcomes are right or wrong."""
    metrics = {m for row in rows for m in row["scores"] if all(r["scores"].get(m) in (0.0, 1.0) for r in rows)}
    if not metrics:
        return []
    n = len({row["doc_id"] for row in rows})
    power = stats.power_of_share(f"{task}, {n} documents, if {ASSUMED:.0%} of the outcomes differed", n, ASSUMED, loss)
    return [power.words]

