"""What the sources yield."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text. `key` decides training or held-out, so that texts on one headword stay together."""

    source: str  # package
    key: str  # headword, chapter or file
    text: str
    kind: str = "prose"  # prose, entry, verses, quote
