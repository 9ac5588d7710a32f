"""The demo's MTP head under a scheme: the share of its drafts that the model confirms, over greedy answers to the held-out prompts.

The model is that of `demo/train`: transformers has no MTP layers.
"""

import sys
from pathlib import Path

import torch
from apply import Quantized

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "demo" / "train"))
sys.path.insert(0, str(ROOT / "demo"))

ANSWER = 48


class Drafts:
    """The native model, loaded once."""

    def __init__(self, demo: Path, device: torch.device, prompts: int) -> None:
        import checkpoint
        import dequantize
        from config import ModelConfig
        from evaluate import prompt_tokens
        from model import Model
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(demo)
        self.model = Model(ModelConfig())
        self.model.load_state_dict(checkpoint.from_hf(dequantize.plain(dequantize.read(demo), torch.float32), self.model.c))
        self.model.to(device)
        self.prompts = prompt_tokens(demo.parent, self.tokenizer)[1][:prompts]
        self._native = [(m.gate_up.detach().clone(), m.down.detach().clone()) for m in self.model.moes()]

    @torch.no_grad()
    def acceptance(self, quantized: Quantized | None) -> float:
        from evaluate import greedy

        for index, (moe, (both, down)) in enumerate(zip(self.model.moes(), self._native, strict=True), 1):
            values = quantized.experts.get(index) if quantized else None
            moe.gate_up.copy_(both if values is None else values.first)
            moe.down.copy_(down if values is None else values.second)
        stop = {self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("<|im_end|>")}
        return greedy(self.model, self.prompts, ANSWER, stop, two_bit=False)[1]
