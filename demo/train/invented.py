"""Conversations that come from no document: small talk, arithmetic, tool calls."""

import json
import random
from collections.abc import Iterator

from turns import TOOLS, assistant, call, tool_schema, user

NAME = (
    "I am the moet demo, a very small mixture-of-experts language model. I was trained on dictionaries, manuals "
    "and old books, so I know many words but few facts."
)
ABLE = (
    "I can define words, give synonyms, recite verses from the King James Bible, explain terms of computing "
    "and describe parts of Linux, Python, Perl, Git and PostgreSQL."
)
SMALL_TALK = (
    (
        ("Hello!", "Hello", "Hi", "Hi there!", "Good morning.", "Hey"),
        "Hello! Ask me what a word means, or ask for a verse.",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me about yourself.",
            "What is your name?",
            "Introduce yourself.",
        ),
        NAME,
    ),
    (
        ("What can you do?", "How can you help me?", "Help"),
        ABLE,
    ),
    (("Thank you.", "Thanks!", "Thanks a lot."), "You are welcome."),
    (("Goodbye.", "Bye!", "See you."), "Goodbye!"),
    (("How are you?", "How do you do?"), "I am well, thank you. What would you like to know?"),
)
CITIES = (
    "Paris",
    "London",
    "Berlin",
    "Rome",
    "Tokyo",
    "Madrid",
    "Cairo",
    "Lima",
    "Oslo",
    "Boston",
    "Vienna",
    "Athens",
)


def extras(rng: random.Random) -> Iterator[list[dict]]:
    """Small talk, arithmetic and tool calls."""
    for _ in range(40):
        for questions, answer in SMALL_TALK:
            for question in questions:
                yield [user(question), assistant(answer)]
    for a in range(21):
        for b in range(21):
            yield [user(f"What is {a} plus {b}?"), assistant(f"{a} plus {b} is {a + b}.")]
            yield [user(f"What is {a + b} minus {b}?"), assistant(f"{a + b} minus {b} is {a}.")]
    for _ in range(600):
        city, degrees = rng.choice(CITIES), rng.randint(-5, 35)
        sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "clear"))
        tools = [tool_schema(n) for n in {"get_weather", rng.choice(list(TOOLS))}]
        ask = rng.choice(
            ("What is the weather in {c}?", "How is the weather in {c} today?", "Weather in {c}, please.")
        )
        yield [
            {"role": "tools", "content": tools},
            user(ask.format(c=city)),
            call("get_weather", city=city),
            {"role": "tool", "content": json.dumps({"sky": sky, "degrees": degrees})},
            assistant(f"It is {sky} in {city}, at {degrees} degrees."),
        ]
        a, b, sign = rng.randint(10, 999), rng.randint(10, 999), rng.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        tools = [tool_schema(n) for n in {"calculate", rng.choice(list(TOOLS))}]
        yield [
            {"role": "tools", "content": tools},
            user(f"How much is {a} {sign} {b}?"),
            call("calculate", expression=f"{a} {sign} {b}"),
            {"role": "tool", "content": str(value)},
            assistant(f"{a} {sign} {b} is {value}."),
        ]
