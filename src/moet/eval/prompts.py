"""Prompts that are answered, not scored: a JSON line each."""

from collections.abc import Iterator
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
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    if schema is not None and not isinstance(schema, dict):
        raise EvalError(f"{name}: expected a JSON schema, found {str(schema)[:60]}")
    if schema is None:
        return
    try:
        validator_for(schema).check_schema(schema)
        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
        for reference in _references(schema):
            resolver.lookup(reference)
    except Unresolvable as e:
        raise EvalError(f"{name}: expected a JSON schema whose references are in it, found {e.ref!r}") from None
    except SchemaError as e:
        raise EvalError(f"{name}: expected a JSON schema, found: {e.message}") from None


def _references(schema: Any) -> Iterator[str]:
    """Every "$ref"; one of elsewhere would be fetched while answers are judged."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
