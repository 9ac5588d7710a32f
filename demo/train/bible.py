"""The King James Bible, read with the program that its package is made for."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from document import Document

# The program abbreviates most books; a request names them in full.
_NAMES = """
Ge = Genesis, Exo = Exodus, Lev = Leviticus, Num = Numbers, Deu = Deuteronomy, Josh = Joshua,
Eccl = Ecclesiastes, SSol = Song of Solomon, Isa = Isaiah, Jer = Jeremiah, Lam = Lamentations,
Eze = Ezekiel, Dan = Daniel, Hos = Hosea, Obad = Obadiah, Mic = Micah, Hab = Habakkuk,
Zep = Zephaniah, Zec = Zechariah, Mal = Malachi, Mat = Matthew, Rom = Romans, Gal = Galatians,
Eph = Ephesians, Phi = Philippians, Col = Colossians, Phmn = Philemon, Heb = Hebrews, Jas = James,
Rev = Revelation, Jdgs = Judges, Est = Esther, Psa = Psalm, Prv = Proverbs, 1Sm = 1 Samuel,
2Sm = 2 Samuel, 1Ki = 1 Kings, 2Ki = 2 Kings, 1Chr = 1 Chronicles, 2Chr = 2 Chronicles,
Neh = Nehemiah, 1Cor = 1 Corinthians, 2Cor = 2 Corinthians, 1Th = 1 Thessalonians,
2Th = 2 Thessalonians, 1Tim = 1 Timothy, 2Tim = 2 Timothy, 1Pet = 1 Peter, 2Pet = 2 Peter,
1Jn = 1 John, 2Jn = 2 John, 3Jn = 3 John, Hag = Haggai
"""
BOOKS = dict(pair.split(" = ") for pair in " ".join(_NAMES.split("\n")).strip().split(", "))


def chapters(root: Path) -> Iterator[Document]:
    """Chapters of the King James Bible, one verse a line as `Genesis 1:1 text`."""
    folder, program = root / "bible-kjv-text/usr/lib", root / "bible-kjv/usr/bin/bible"
    out = subprocess.run(
        [str(program.resolve()), "-f", "Gen1:1-Rev22:21"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    verses: dict[str, list[str]] = {}
    for line in out.stdout.splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match:
            book, chapter, verse, text = match.groups()
            book = BOOKS.get(book, book)
            verses.setdefault(f"{book} {chapter}", []).append(f"{book} {chapter}:{verse} {text}")
    for key, lines in verses.items():
        yield Document("bible-kjv-text", key, "\n".join(lines), "verses")
