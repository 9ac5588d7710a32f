"""The unpacked packages as documents of plain text."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import clean
from bible import chapters
from document import Document

FORTUNES = (
    "art",
    "computers",
    "cookie",
    "debian",
    "definitions",
    "education",
    "food",
    "goedel",
    "humorists",
    "kids",
    "law",
    "linux",
    "literature",
    "magic",
    "medicine",
    "miscellaneous",
    "pets",
    "people",
    "platitudes",
    "science",
    "sports",
    "wisdom",
    "work",
)


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return data.decode("utf-8", "replace")


def dictionary(root: Path, package: str, name: str) -> Iterator[tuple[str, str]]:
    """(headword, raw entry) of a dictd dictionary; offsets and lengths are base-64 numbers."""
    folder = root / package / "usr/share/dictd"
    data = gzip.decompress((folder / f"{name}.dict.dz").read_bytes())
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(text):
        value = 0
        for c in text:
            value = value * 64 + digits[c]
        return value

    seen = set()
    for line in (folder / f"{name}.index").read_text("utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        start, length = number(start), number(length)
        if word.startswith("00") or start in seen:
            continue
        seen.add(start)
        yield word, data[start : start + length].decode("utf-8", "replace").strip()


def gcide(raw: str) -> str:
    """A GCIDE entry without its source notes, pronunciation, etymology and cross-reference braces."""
    raw = re.sub(r"\[(?:1913 Webster|PJC|WordNet[^\]]*|Century[^\]]*|[^\]]{0,40}\+PJC)\]", "", raw)
    raw = re.sub(r"\\[^\\\n]*\\(?:\s*\([^)\n]*\))?", "", raw)
    raw = re.sub(r"\[(?:[^\[\]]|\[[^\]]*\])*\]", "", raw)
    return paragraphs(raw.replace("{", "").replace("}", ""))


def paragraphs(raw: str) -> str:
    """Hard-wrapped text with one line per paragraph or numbered sense."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:\d+\.|\([a-z]\)|Syn:|Note:)\s)", raw)
    lines = [re.sub(r"\s+", " ", block).replace(" ,", ",").strip() for block in blocks]
    return clean.tidy("\n".join(line for line in lines if line))


def entries(root: Path) -> Iterator[Document]:
    """Dictionary entries, one document each."""
    for word, raw in dictionary(root, "dict-gcide", "gcide"):
        yield Document("dict-gcide", word.lower(), gcide(raw), "entry")
    for word, raw in dictionary(root, "dict-wn", "wn"):
        text = re.sub(r"\s*\n\s+(?!(?:n|v|adj|adv) \d|\d+:|(?:n|v|adj|adv):)", " ", raw)
        text = re.sub(r"\n\s+", "\n", text.replace("{", "").replace("}", ""))
        yield Document("dict-wn", word.lower(), clean.tidy(text), "entry")
    for package, name in (("dict-foldoc", "foldoc"), ("dict-devil", "devil")):
        for word, raw in dictionary(root, package, name):
            raw = re.sub(r"\{([^{}]*)\}", r"\1", raw)
            raw = re.sub(r"\(\d{4}-\d\d-\d\d\)|<[\w\s,]+>", "", raw)
            yield Document(package, word.lower(), paragraphs(raw), "entry")


def prose(root: Path) -> Iterator[Document]:
    """Manuals, guides and essays: one document per file."""
    rules = (
        (
            "anarchism",
            "usr/share/doc/anarchism/markdown",
            "*.md.gz",
            lambda t: clean.tidy(t.replace("_", "")),
        ),
        ("python3.11-doc", "usr/share/doc/python3.11/html/_sources", "**/*.rst.txt", clean.rst),
        ("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/html/_sources", "**/*.rst.txt", clean.rst),
        ("perl-doc", "usr/share/perl", "**/*.pod", clean.pod),
        ("git-doc", "usr/share/doc/git-doc", "**/*.txt", clean.asciidoc),
        ("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html", "*.html", clean.html),
        ("debian-handbook", "usr/share/doc/debian-handbook/html/en-US", "*.html", clean.html),
        ("debian-reference-en", "usr/share/debian-reference", "*.en.html", clean.html),
        ("installation-guide-amd64", "usr/share/doc/installation-guide-amd64/en", "*.html", clean.html),
        ("developers-reference", "usr/share/developers-reference", "*.html", clean.html),
        ("debian-policy", "usr/share/doc/debian-policy", "**/*.html", clean.html),
        ("debian-faq", "usr/share/doc", "**/*.html", clean.html),
    )
    for package, folder, pattern, cleaner in rules:
        for path in sorted((root / package / folder).glob(pattern)):
            if not path.is_file() or re.search(
                r"translations|RelNotes|changelog|genindex|searchindex|/search\.|perltoc|\bfhs", str(path)
            ):
                continue
            text = cleaner(read(path))
            ascii_share = sum(c < "\x7f" for c in text) / max(len(text), 1)
            if len(text) > 300 and ascii_share > 0.97:
                yield Document(package, f"{package}/{path.relative_to(root / package / folder)}", text)


def quotes(root: Path) -> Iterator[Document]:
    """The Jargon File by entry, and fortunes."""
    jargon = read(root / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz")
    for block in re.split(r"\n(?=   :[^:\n]+:)", jargon):
        match = re.match(r"   :([^:\n]+):(?:[ ]/[^/]*/)?,?\s*", block)
        if match and "\u2502" not in block:
            text = paragraphs(f"{match.group(1)}, " + re.sub(r"[{}]", "", block[match.end() :]))
            yield Document("jargon-text", match.group(1).lower(), text, "entry")
    for name in FORTUNES:
        path = root / "fortunes/usr/share/games/fortunes" / name
        if path.exists():
            for number, quote in enumerate(re.split(r"\n%\n", read(path))):
                yield Document("fortunes", f"{name}/{number}", clean.tidy(quote), "quote")


def documents(root: Path) -> Iterator[Document]:
    """Every document with its duplicates left out (pages that two packages share)."""
    seen = set()
    for part in (entries, chapters, prose, quotes):
        for document in part(root):
            mark = hash(document.text[:2000])
            if mark not in seen and len(document.text) > 20:
                seen.add(mark)
                yield document
