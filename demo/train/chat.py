"""Conversations made out of the documents: questions whose answers the texts hold."""

import random
import re
from collections.abc import Iterator

import clean
from document import Document
from turns import DEFINE, EXPLAIN, GENERIC, POS, SYSTEM, TITLES, TOOLS, assistant, call, tool_schema, user


def senses(entry: str) -> list[tuple[str, str, str, list[str]]]:
    """(part of speech, meaning, example, synonyms) of each sense of a WordNet entry."""
    found, pos = [], ""
    for match in re.finditer(
        r"(?:\b(n|v|adj|adv) ?)?(?:\d+)?: (.*?)(?=\s+(?:n|v|adj|adv) ?\d*: |\s+\d+: |\n|$)", entry
    ):
        pos = match.group(1) or pos
        body = re.sub(r"\[(?:also|ant): [^\]]*\]", "", match.group(2))
        synonyms = re.search(r"\[syn: ([^\]]*)\]", body)
        words = re.sub(r"- (?=\w)", "-", synonyms.group(1)).split(", ") if synonyms else []
        parts = re.sub(r"\[[^\]]*\]", "", body).split('; "')
        meaning = parts[0].strip(" ;")
        example = parts[1].split('"')[0].strip() if len(parts) > 1 else ""
        if pos in POS and 8 < len(meaning) < 300:
            found.append((POS[pos], meaning, example, words))
    return found


def _wordnet(doc: Document, rng: random.Random) -> Iterator[list[dict]]:
    word = doc.text.split("  ")[0].split("\n")[0].strip()
    found = senses(doc.text)
    if not found or len(word) > 40:
        return
    pos, meaning, example, synonyms = found[0]
    answer = f"As {'an' if pos[0] == 'a' else 'a'} {pos}, {word} means: {meaning}."
    if example and len(example) < 120:
        answer += f' For example: "{example}".'
    for pos2, meaning2, _, _ in found[1:3]:
        answer += f" It can also mean: {meaning2}."
    yield [user(rng.choice(DEFINE).format(w=word)), assistant(answer)]
    others = [s for s in synonyms if s != word]
    if others and rng.random() < 0.3:
        yield [
            user(rng.choice(("Give me a synonym for {w}.", "What is another word for {w}?")).format(w=word)),
            assistant(
                f"Another word for {word} is {others[0]}."
                if len(others) == 1
                else f"Other words for {word} are {', '.join(others[:-1])} and {others[-1]}."
            ),
        ]
    if rng.random() < 0.06:
        tools = [tool_schema(n) for n in {"define_word", rng.choice(list(TOOLS))}]
        yield [
            {"role": "tools", "content": tools},
            user(rng.choice(DEFINE).format(w=word)),
            call("define_word", word=word),
            {"role": "tool", "content": f"{pos}: {meaning}"},
            assistant(f"As a {pos}, {word} means: {meaning}."),
        ]


def _entry(doc: Document, rng: random.Random) -> Iterator[list[dict]]:
    lines = [line for line in doc.text.split("\n") if line]
    if doc.source == "dict-foldoc" and len(lines) > 1 and len(lines[-1]) > 30:
        body = [line for line in lines[1:] if len(line) > 25][:2]
        if body:
            yield [user(rng.choice(EXPLAIN).format(w=lines[0])), assistant("\n\n".join(body)[:900])]
    elif doc.source == "dict-devil" and len(doc.text) < 900:
        yield [user(f"How does the Devil's Dictionary define {doc.key}?"), assistant(doc.text)]
    elif doc.source == "jargon-text" and len(doc.text) < 900:
        yield [user(f"What do hackers mean by {doc.key}?"), assistant(doc.text)]
    elif doc.source == "dict-gcide" and 40 < len(doc.text) < 500 and rng.random() < 0.2:
        ask = rng.choice(
            ("Define {w} as an old dictionary would.", "What does an old dictionary say about {w}?")
        )
        yield [user(ask.format(w=doc.key)), assistant(doc.text)]


def _verses(doc: Document, rng: random.Random) -> Iterator[list[dict]]:
    lines = [re.match(r"(.+ \d+:\d+) (.*)", line).groups() for line in doc.text.split("\n")]
    for number, (place, text) in enumerate(lines):
        roll = rng.random()
        if roll < 0.55:
            ask = rng.choice(("Recite {p}.", "What does {p} say?", "Read {p} to me.", "Quote {p}."))
            yield [user(ask.format(p=place)), assistant(text)]
        elif roll < 0.7 and number + 1 < len(lines):
            yield [
                user(f"Which verse follows {place}?"),
                assistant(f"{lines[number + 1][0]}: {lines[number + 1][1]}"),
            ]
        elif roll < 0.74:
            book, chapter, verse = re.match(r"(.+) (\d+):(\d+)", place).groups()
            tools = [tool_schema(n) for n in {"get_verse", rng.choice(list(TOOLS))}]
            yield [
                {"role": "tools", "content": tools},
                user(f"Please look up {place}."),
                call("get_verse", book=book, chapter=int(chapter), verse=int(verse)),
                {"role": "tool", "content": text},
                assistant(f"{place} says: {text}"),
            ]


def from_document(doc: Document, rng: random.Random) -> Iterator[list[dict]]:
    """All conversations one document gives."""
    if doc.source == "dict-wn":
        yield from _wordnet(doc, rng)
    elif doc.kind == "entry":
        yield from _entry(doc, rng)
    elif doc.kind == "verses":
        yield from _verses(doc, rng)
    elif doc.kind == "quote" and len(doc.text) < 500:
        yield [
            user(
                rng.choice(("Tell me a quotation about {t}.", "Say something about {t}.")).format(
                    t=doc.key.split("/")[0]
                )
            ),
            assistant(doc.text),
        ]
    elif doc.kind == "prose":
        for title, body in clean.sections(doc.text)[:20]:
            title = re.sub(r"^[A-Z]?[\d.]+\s+", "", title)
            if title.isupper() or title.title() in GENERIC:
                continue
            ask = title if title.endswith("?") else rng.choice(EXPLAIN).format(w=title)
            yield [user(f"{ask[:-1]} ({TITLES.get(doc.source, 'Debian')}){ask[-1]}"), assistant(body)]


def join(samples: list[list[dict]], rng: random.Random) -> list[list[dict]]:
    """Shuffles; a quarter of the plain conversations become turns of a longer one, some get a system prompt."""
    rng.shuffle(samples)
    joined: list[list[dict]] = []
    for sample in samples:
        plain = sample[0]["role"] == "user"
        if (
            plain
            and joined
            and joined[-1][0]["role"] == "user"
            and len(joined[-1]) < 6
            and rng.random() < 0.25
        ):
            joined[-1] = joined[-1] + sample
        else:
            joined.append(sample)
    return [
        [{"role": "system", "content": rng.choice(SYSTEM)}] + c
        if c[0]["role"] == "user" and rng.random() < 0.15
        else c
        for c in joined
    ]
