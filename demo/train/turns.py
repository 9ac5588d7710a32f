"""Turns of a conversation, and the phrases and tools that conversations use."""

import json

POS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
DEFINE = (
    "What does {w} mean?",
    'What does "{w}" mean?',
    "Define {w}.",
    "What is the meaning of {w}?",
    "Define the word {w}.",
    "Can you tell me what {w} means?",
    "What is {w}?",
)
EXPLAIN = ("What is {w}?", "Explain {w}.", "Tell me about {w}.", "Can you explain {w}?", "Describe {w}.")
TITLES = {
    "python3.11-doc": "Python",
    "linux-doc-6.1": "Linux",
    "perl-doc": "Perl",
    "git-doc": "Git",
    "postgresql-doc-15": "PostgreSQL",
    "anarchism": "anarchism",
}
GENERIC = (
    "Introduction",
    "Overview",
    "Synopsis",
    "Description",
    "Notes",
    "Examples",
    "Parameters",
    "Author",
    "Usage",
    "See Also",
    "Availability",
    "Compatibility",
    "Options",
    "Background",
    "Example",
    "Summary",
)
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the user's question.",
)
TOOLS = {
    "define_word": ("Look a word up in a dictionary.", {"word": "string"}),
    "get_verse": (
        "Read one verse of the Bible.",
        {"book": "string", "chapter": "integer", "verse": "integer"},
    ),
    "get_weather": ("Get the weather in a city.", {"city": "string"}),
    "calculate": ("Evaluate an arithmetic expression.", {"expression": "string"}),
    "search_manual": ("Search the manual of a program.", {"program": "string", "query": "string"}),
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def tool_schema(name: str) -> dict:
    """A tool in the form the chat completions interface takes it."""
    text, fields = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": {k: {"type": v} for k, v in fields.items()},
        "required": list(fields),
    }
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def call(name: str, **arguments) -> dict:
    body = json.dumps({"name": name, "arguments": arguments})
    return assistant(f"<tool_call>\n{body}\n</tool_call>")
