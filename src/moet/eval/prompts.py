"""Prompts that are answered, not scored: a JSON line each."""

from pathlib import Path
from typing import Any

from moet.errors import EvalError
from moet.eval import lines
from moet.eval.subject import Prompt


def read(path: Path) -> list[Prompt]:
    """Lines with `messages` (and `tools`, `schema`), or with `prompt` (and `schema`); grouped by `domain`, `language` or `kind`.

    Raises EvalError: no such file, a line that is no such object, or a `schema` or a tool's `parameters` that is no JSON schema.
    """
    found = lines.objects(path.name, lines.read_text(path, f"--prompts {path}"), '"messages" or "prompt"')
    if not found:
        raise EvalError(f"--prompts {path}: expected a prompt a line, found none")
    return [_prompt(name, row) for name, row in found]


def _prompt(name: str, row: dict[str, Any]) -> Prompt:
    domains = [lines.text_of(name, row, key) for key in ("domain", "language", "kind")]
    text, (messages, tools), schema = lines.text_of(name, row, "prompt"), lines.conversation(name, row), row.get("schema")
    if not (messages or text):
        raise EvalError(f'{name}: expected an object with "messages" or "prompt", found {str(row)[:60]}')
    for one in (schema, *(t["function"].get("parameters") for t in tools)):
        _check(name, one)
    return Prompt(name, next(filter(None, domains), "prompts"), text, tuple(messages), tuple(tools), schema)


def _check(name: str, schema: Any) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    if schema is not None and not isinstance(schema, dict):
        raise EvalError(f"{name}: expected a JSON schema, found {str(schema)[:60]}")
    try:
        if schema is not None:
            validator_for(schema).check_schema(schema)
    except SchemaError as e:
        raise EvalError(f"{name}: expected a JSON schema, found: {e.message}") from None
