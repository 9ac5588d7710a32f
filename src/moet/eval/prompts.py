"""Prompts that are answered, not scored: a JSON line each."""

import json
from pathlib import Path
from typing import Any

from moet.errors import EvalError
from moet.eval.subject import Prompt


def read(path: Path) -> list[Prompt]:
    """Lines with `messages` (and `tools`, `schema`), or with `prompt` (and `schema`); grouped by `domain`, `language` or `kind`.

    Raises EvalError: no such file, a line that is no such object, or a `schema` or a tool's `parameters` that is no JSON schema.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise EvalError(f"--prompts {path}: expected a readable UTF-8 file, found: {e}") from None
    prompts = [_prompt(f"{path.name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise EvalError(f"--prompts {path}: expected a prompt a line, found none")
    return prompts


def _prompt(name: str, line: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except ValueError as e:
        raise EvalError(f"{name}: expected a JSON object, found: {e}") from None
    if not isinstance(row, dict) or not (row.get("messages") or row.get("prompt")):
        raise EvalError(f'{name}: expected an object with "messages" or "prompt", found {line[:60]!r}')
    domain = row.get("domain") or row.get("language") or row.get("kind") or "prompts"
    prompt = Prompt(name, domain, row.get("prompt", ""), tuple(row.get("messages", ())), tuple(row.get("tools") or ()), row.get("schema"))
    for schema in (prompt.schema, *(t["function"].get("parameters") for t in prompt.tools)):
        _check(name, schema)
    return prompt


def _check(name: str, schema: dict[str, Any] | None) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        if schema is not None:
            validator_for(schema).check_schema(schema)
    except SchemaError as e:
        raise EvalError(f"{name}: expected a JSON schema, found: {e.message}") from None
