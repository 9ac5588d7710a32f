"""A byte-level BPE tokenizer with a chat template, trained on a paragraph: any text round-trips."""

from functools import lru_cache
from pathlib import Path

TEXT = """The quick brown fox jumps over the lazy dog and then it sleeps. A mixture of experts routes every token to a few
experts; the router chooses them. def main(args):
    for i in range(10):
        print(i, args)
    return 0
0123456789 numbers, punctuation: (a) [b] {c} <d> = + - * / % & | ! ? ~ ^ @ # $ _ ; , . "quoted" 'single'.
Attention, key, value, query, cache, block, graph, kernel, tensor, weight, scale, quantization, decode, prefill.
"""
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"]
CHAT = (
    "{%- for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)


@lru_cache(maxsize=4)
def _files(vocab: int) -> dict[str, bytes]:
    import tempfile

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    bpe.add_tokens([f"<x{i}>" for i in range(vocab - bpe.get_vocab_size())])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    fast.chat_template = CHAT
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_tokenizer(out: Path, vocab: int) -> None:
    """tokenizer.json and what goes with it; ids 0, 1, 2 are begin, end, padding."""
    for name, content in _files(vocab).items():
        (out / name).write_bytes(content)
