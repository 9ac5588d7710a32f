"""Markup to plain text: HTML, reStructuredText, POD, AsciiDoc.

Every cleaner returns text whose headings are lines that start with `#`, so that one
rule finds sections whatever the source was.
"""

import re
from html.parser import HTMLParser

_BLOCK = {"p", "div", "pre", "ul", "ol", "dl", "dt", "dd", "table", "tr", "blockquote", "section", "br", "hr"}
_SKIP = {"script", "style", "head", "nav", "footer", "header", "svg"}
_HEADING = {"h1", "h2", "h3", "h4", "h5"}


class _Text(HTMLParser):
    """Collects the visible text of a page; drops navigation by tag name and by class."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.stack = [], []
        self.skipping, self.pre = 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "link", "img", "input", "br", "hr", "col"):
            self.parts.append("\n" if tag in ("br", "hr") else "")
            return
        classes = dict(attrs).get("class") or ""
        drop = tag in _SKIP or re.search(r"nav|sidebar|footer|related|toc\b|headerlink|footnotes", classes)
        self.stack.append((tag, bool(drop)))
        self.skipping += bool(drop)
        self.pre += tag == "pre"
        if tag in _HEADING:
            self.parts.append("\n\n# ")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        elif tag in _BLOCK:
            self.parts.append("\n\n" if tag != "tr" else "\n")

    def handle_endtag(self, tag):
        while any(open_tag == tag for open_tag, _ in self.stack):
            open_tag, drop = self.stack.pop()
            self.skipping -= drop
            self.pre -= open_tag == "pre"
            if open_tag == tag:
                break
        if tag in _HEADING or tag in ("p", "pre", "li", "dd"):
            self.parts.append("\n" if tag == "li" else "\n\n")

    def handle_data(self, data):
        if not self.skipping:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html(page: str) -> str:
    """The readable text of one HTML page."""
    parser = _Text()
    parser.feed(page)
    text = "".join(parser.parts)
    text = re.sub(r"(?m)^# *\n+ *", "# ", text)
    text = re.sub(r"(?m)^(#+) +", r"\1 ", re.sub(r"(?m)^ {1,3}(?=\S)", "", text))
    text = re.sub(r"(?m)^-[ ]*\n+(?=[^\n#-])", "- ", text)
    return tidy(re.sub(r"(?m)^#? ?-?[ ]*$", "", text))


def rst(text: str) -> str:
    """reStructuredText without roles, targets and directives; underlined titles become headings."""
    text = re.sub(r"(?m)^([=\-~^\"'*+#`:.]{3,})\n([^\n]+)\n\1[ \t]*$", r"# \2", text)
    text = re.sub(r"(?m)^(\S[^\n]*)\n([=\-~^\"'*+#`.])\2{2,}[ \t]*$", r"# \1", text)
    text = re.sub(
        r"(?m)^\.\. (toctree|index|image|figure|kernel-\w+|include|only|highlight|sectionauthor|moduleauthor"
        r"|contents|module|currentmodule|testsetup|doctest|raw|tabularcolumns)::.*\n("
        r"(?:[ \t]+.*\n|[ \t]*\n(?=[ \t]))*)",
        "",
        text,
    )
    text = re.sub(
        r"(?m)^[ \t]*\.\. (note|warning|seealso|tip|important|caution)::[ \t]*",
        lambda m: m.group(1).capitalize() + ": ",
        text,
    )
    text = re.sub(
        r"(?m)^([ \t]*)\.\. (?:c:)?(?:function|method|class|attribute|data|exception|option|opcode|envvar"
        r"|versionadded|versionchanged|deprecated|describe|staticmethod|classmethod|macro|type|member)::[ \t]*",
        r"\1",
        text,
    )
    text = re.sub(r"(?m)^[ \t]*\.\. .*$", "", text)
    text = re.sub(r"(?m)^[ \t]+:\w+:.*$", "", text)
    text = re.sub(r":[\w:+-]+:`!?~?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]+>`_+", r"\1", text)
    text = re.sub(r"`([^`]+)`_*", r"\1", text)
    text = re.sub(r"(?<!\*)\*{1,2}([^*\n]+)\*{1,2}(?!\*)", r"\1", text)
    text = re.sub(r"::[ \t]*$", ":", text, flags=re.MULTILINE)
    return tidy(re.sub(r"(?m)^[=\-+| ]{6,}$", "", text))


def pod(text: str) -> str:
    """Plain Old Documentation: commands and formatting codes resolved."""
    text = re.sub(
        r"(?ms)^=(?:begin|for)\b.*?(?=^=(?:end|cut)\b|\Z)|^=(?:end|cut|pod|encoding|back|over)\b[^\n]*",
        "",
        text,
    )
    text = re.sub(r"(?m)^=head\d\s+", "# ", text)
    text = re.sub(r"(?m)^=item\s*", "- ", text)
    for _ in range(3):  # codes nest, for example C<< B<x> >>
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^|<>]+)\|)?([^<>]*)>", lambda m: m.group(1) or m.group(2), text)
        text = re.sub(r"[BCFISL]<<+\s+(.*?)\s+>>+", r"\1", text)
        text = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", text)
    text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    return tidy(text)


def asciidoc(text: str) -> str:
    """AsciiDoc as Git writes it."""
    text = re.sub(r"(?m)^(\S[^\n]*)\n([=\-~^])\2{2,}[ \t]*$", r"# \1", text)
    text = re.sub(r"(?m)^(?:ifdef|ifndef|endif|include|:\w+).*$|^\[.*\]$|^[-.+*=]{4,}$|^\+$|^//.*$", "", text)
    text = re.sub(r"linkgit:([\w-]+)\[(\d)\]", r"\1(\2)", text)
    text = re.sub(r"(?m)^(\S.*)::$", r"\1", text)
    return tidy(re.sub(r"`([^`\n]+)`", r"\1", text))


def tidy(text: str) -> str:
    """Normal line ends, no trailing blanks, no control characters, at most one empty line in a row."""
    text = text.replace("\r", "").replace("\t", "    ").replace("\u00a0", " ").replace("\u00b6", "")
    text = text.translate(
        {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "--", 0x2026: "..."}
    )
    text = re.sub(r"[^\n\x20-\x7e\u00a0-\u024f\u0370-\u03ff\u2000-\u22ff]", "", text)
    text = re.sub(r"[ ]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def sections(text: str) -> list[tuple[str, str]]:
    """(title, first paragraphs) of every section with prose, at most about 900 characters each."""
    found = []
    for match in re.finditer(r"(?m)^#+ +(.+)\n+((?:(?!#).*\n?)+)", text):
        title, body = match.group(1).strip(), match.group(2).strip()
        kept = []
        for paragraph in body.split("\n\n"):
            prose = re.match(r"[A-Z\"'(`]", paragraph) and paragraph.count(" ") > 5
            if not prose or sum(map(len, kept)) + len(paragraph) > 900:
                break
            kept.append(re.sub(r"\s+", " ", paragraph))
        if kept and 3 < len(title) < 80 and len(kept[0]) > 60:
            found.append((title, "\n\n".join(kept)))
    return found
