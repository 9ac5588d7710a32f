"""A folder's tokenizer, by transformers."""

import contextlib
from pathlib import Path
from typing import Any

from moet.errors import EvalError


class FolderTokenizer:
    """start: the start token, or the end-of-text token where a model has none, as lm-eval does it; so that a window's first token is scored too."""

    def __init__(self, folder: Path | str) -> None:
        self.own = _load(folder)
        start = self.own.bos_token_id if self.own.bos_token_id is not None else self.own.eos_token_id
        self.start: list[int] = [] if start is None else [start]

    def encode(self, text: str) -> list[int]:
        return self.own.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.own.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            return self.own.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant")
        except Exception as e:  # noqa: BLE001 - a template is the model's own program and may raise anything
            raise EvalError(f"{self.own.name_or_path}, chat template: expected it to take the messages, found: {type(e).__name__}: {str(e)[:200]}") from None


def _load(folder: Path | str) -> Any:
    """A folder whose model_type transformers does not know (kimi_k2) has a tokenizer.json all the same."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as e:  # noqa: BLE001 - what a damaged file causes in transformers and tokenizers comes through
        if (Path(folder) / "tokenizer.json").is_file():
            with contextlib.suppress(Exception):
                return PreTrainedTokenizerFast.from_pretrained(folder)
        raise EvalError(f"{folder}: expected a tokenizer that transformers loads, found: {str(e)[:300]}") from None
