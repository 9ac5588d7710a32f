"""Whether an answer is what its prompt's schemas ask for."""

import json
from typing import Any

from moet.eval.subject import Answer, Prompt


def valid(prompt: Prompt, answer: Answer) -> bool | None:
    """None: nothing to judge, or nobody looked for tool calls.

    tools: at least one call, each of a tool that was offered, with arguments that are JSON and validate against its `parameters`. schema: the whole text, white space
    around it apart, is JSON and validates.
    """
    if prompt.tools:
        if answer.calls is None:
            return None
        schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in prompt.tools}
        return bool(answer.calls) and all(name in schemas and _validates(arguments, schemas[name]) for name, arguments in answer.calls)
    if prompt.schema is not None:
        return _validates(answer.text.strip(), prompt.schema)
    return None


def _validates(text: str, schema: dict[str, Any]) -> bool:
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), schema)
    except (ValueError, ValidationError):
        return False
    return True
