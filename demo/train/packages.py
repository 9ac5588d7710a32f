"""The Debian packages the corpus is made of: fetch them, unpack them, list their licences."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One Debian package: its licence in short, and what is taken from it."""

    name: str
    licence: str
    used: str


PACKAGES = (
    Package(
        "dict-gcide", "GPL-3+ (GNU Collaborative International Dictionary of English)", "dictionary entries"
    ),
    Package("dict-wn", "WordNet 3.0 licence (Princeton, permissive)", "dictionary entries"),
    Package("dict-foldoc", "GFDL-1.2+", "dictionary entries of computing"),
    Package("dict-devil", "public domain (Ambrose Bierce)", "dictionary entries"),
    Package("jargon-text", "public domain", "the Jargon File"),
    Package("bible-kjv", "GPL-2+ (program that unpacks the text)", "not text: the reader of bible-kjv-text"),
    Package("bible-kjv-text", "public domain", "King James Bible"),
    Package("anarchism", "GPL-2+", "An Anarchist FAQ"),
    Package("python3.11-doc", "PSF-2", "Python documentation"),
    Package("linux-doc-6.1", "GPL-2 (parts GFDL-1.1+, CC-BY-4.0)", "kernel documentation, English"),
    Package("perl-doc", "Artistic or GPL-1+", "Perl documentation"),
    Package("git-doc", "GPL-2", "Git manual pages and guides"),
    Package("postgresql-doc-15", "PostgreSQL licence", "PostgreSQL manual"),
    Package("debian-handbook", "CC-BY-SA-3.0 or GPL-2+", "Debian Administrator's Handbook, English"),
    Package("debian-reference-en", "GPL-2+", "Debian Reference"),
    Package("installation-guide-amd64", "GPL-2", "Debian installation guide, English"),
    Package("developers-reference", "GPL-2", "Debian Developer's Reference"),
    Package("debian-policy", "GPL-2+", "Debian Policy"),
    Package("debian-faq", "GPL-2+", "Debian FAQ"),
    Package("fortunes", "BSD-like compilation of short quotations", "quotations, selected files"),
)


def fetch(work: Path) -> Path:
    """Downloads and unpacks every package under `work`; returns the folder with one root per package.

    A package that is already unpacked is left alone, so a second run needs no network.
    """
    debs, root = work / "debs", work / "root"
    debs.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        target = root / package.name
        if target.exists():
            continue
        if not list(debs.glob(f"{package.name}_*.deb")):
            subprocess.run(["apt-get", "download", package.name], cwd=debs, check=True)
        (deb,) = debs.glob(f"{package.name}_*.deb")
        target.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(deb), str(target)], check=True)
    return root


def version(work: Path, name: str) -> str:
    """The version in a downloaded package's file name."""
    (deb,) = (work / "debs").glob(f"{name}_*.deb")
    return re.sub("%3a", ":", deb.name.split("_")[1])


def write_table(work: Path, text_bytes: dict[str, int], path: Path) -> None:
    """Writes CORPUS.md: package, version, licence and the bytes of clean text taken from it."""
    rows = [
        "# Corpus",
        "",
        "Every text the demo model was trained on comes from these Debian 12 packages; each is",
        "redistributable under the licence given (the package's `copyright` file has the full terms).",
        "`packages.py` fetches them, `sources.py` and `clean.py` turn them into plain text, `chat.py`",
        "makes the conversations out of the same texts.",
        "",
        "| package | version | licence | used | clean text, bytes |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for package in PACKAGES:
        count = text_bytes.get(package.name, 0)
        rows.append(
            f"| {package.name} | {version(work, package.name)} | {package.licence} | {package.used} | {count:,} |"
        )
    rows += [
        "",
        f"Clean text in all: {sum(text_bytes.values()):,} bytes (training and held-out together).",
        "",
    ]
    path.write_text("\n".join(rows))
