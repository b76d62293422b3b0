"""Breaks the long lines of the Markdown pages at 120 characters.

    python scripts/dev/wrap_pages.py                # all pages
    python scripts/dev/wrap_pages.py docs/gpu.md    # these

A paragraph or an item of a list is filled anew if one of its lines is too long, or if a line stops
so early that much of the next one would fit. Code, tables, headings, comments and pictures stay as
they are, and so do the pages that other scripts write. Short code in backticks is not broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 120
MOST_FREE = 40  # columns that a line may leave free although the next word fits
LONGEST_CODE = 80  # characters in backticks that stay on one line
GENERATED = ("docs/flags.md", "magicdec/demo/README.md")
ITEM = re.compile(r" *([-*+]|\d+[.)]) +")
BEGIN = re.compile(rf"{ITEM.pattern}| *")
# A line that no paragraph contains: a heading, a row of a table, a picture, a comment, a rule.
APART = re.compile(r" *(#+ |\||!\[|<!--|-{3,}$|$)")
# A word that would begin a block of its own at the start of a line.
BEGINS_A_BLOCK = re.compile(r"[-*+#=]+|\d+[.)]|[>|].*|<!--.*")


def pages() -> list[Path]:
    """The pages that people write."""
    folders = ("*.md", "docs/**/*.md", "results/**/*.md", "scripts/**/README.md")
    found = [page for pattern in folders for page in sorted(ROOT.glob(pattern))]
    return [page for page in found if str(page.relative_to(ROOT)) not in GENERATED]


def wrapped(text: str) -> str:
    """The text of a page with its paragraphs filled where they need it."""
    lines: list[str] = []
    for is_paragraph, block in blocks(text.splitlines()):
        lines += filled(block) if is_paragraph and needs_filling(block) else block
    return "".join(f"{line}\n" for line in lines)


def blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """The lines in groups: whether it is a paragraph or an item, and its lines."""
    paragraph: list[str] = []
    fenced = False
    for number, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        code = not paragraph and line.startswith("    ") and not ITEM.match(line)
        if fence or fenced or code or APART.match(line):
            if paragraph:
                yield True, paragraph
            paragraph = []
            fenced ^= fence
            yield False, lines[number : number + 1]
        elif paragraph and ITEM.match(line):
            yield True, paragraph
            paragraph = [line]
        else:
            paragraph.append(line)
    if paragraph:
        yield True, paragraph


def needs_filling(paragraph: list[str]) -> bool:
    """Whether a line is too long, or stops too early. A hard line break stays."""
    if any(line.endswith(("  ", "\\")) for line in paragraph):
        return False
    follows = [words_of(line)[0] for line in paragraph[1:]]
    free = [WIDTH - len(line) for line in paragraph]
    early = (f > max(MOST_FREE, len(w)) for f, w in zip(free, follows, strict=False))
    return min(free) < 0 or any(early)


def words_of(text: str) -> list[str]:
    """The words. Short code in backticks is one; what may begin no line is joined to another."""
    parts = re.findall(rf"(?:`[^`]{{,{LONGEST_CODE}}}`|\S)+", " ".join(text.split()))
    words = parts[:1]
    for word in parts[1:]:
        if BEGINS_A_BLOCK.fullmatch(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def filled(paragraph: list[str]) -> list[str]:
    """The paragraph in lines as long as they may be. Further lines of an item are indented."""
    match = BEGIN.match(paragraph[0])
    assert match is not None
    begin = match[0]
    indent = " " * len(begin)
    lines = [begin]
    for word in words_of("\n".join(paragraph)[len(begin) :]):
        line = lines[-1]
        first = line in (begin, indent)
        if first or len(line) + 1 + len(word) <= WIDTH:
            lines[-1] = f"{line}{word}" if first else f"{line} {word}"
        else:
            lines.append(f"{indent}{word}")
    return lines


if __name__ == "__main__":
    for page in [Path(name) for name in sys.argv[1:]] or pages():
        page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
