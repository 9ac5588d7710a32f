"""The tokenizer: byte-level BPE of 8192 tokens, with a ChatML-like template and Hermes tool calls."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

VOCABULARY = 8192
CONTEXT = 2048
BOS, EOS, PAD, START, END = "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"
# Not special: a tool call must survive skip_special_tokens, because parsers read it from the text.
CALL = ("<tool_call>", "</tool_call>")

TEMPLATE = r"""
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call these functions:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nTo call one, answer with\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


def build(texts: Iterable[str], folder: Path) -> PreTrainedTokenizerBase:
    """Learns the merges from `texts` and writes the tokenizer files to `folder`."""
    core = Tokenizer(models.BPE())
    # Digits stand alone, so that a small model can spell numbers.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL),
        special_tokens=[PAD, BOS, EOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens(list(CALL))
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    assert core.get_vocab_size() == VOCABULARY
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {
        "bos_token_id": core.token_to_id(BOS),
        "pad_token_id": core.token_to_id(PAD),
        "eos_token_id": [core.token_to_id(EOS), core.token_to_id(END)],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: PreTrainedTokenizerBase, conversation: list[dict]) -> str:
    """A conversation as one training text; a leading `tools` message holds the tool schemas."""
    tools = None
    if conversation[0]["role"] == "tools":
        tools, conversation = conversation[0]["content"], conversation[1:]
    return tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False) + EOS
