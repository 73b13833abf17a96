"""No page, message or document has a word that the glossary (docs/glossary.md) has retired."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
#: A comment, tag or variable of a template, and what a script says to the browser alone.
UNSEEN = re.compile(r"\{#.*?#\}|\{\{.*?\}\}|<script\b.*?</script>|</?[a-z][^>]*>", re.DOTALL)
#: A tag of the template engine, whose quoted words are shown.
TAG = re.compile(r"\{%.*?%\}", re.DOTALL)
QUOTED = re.compile(r"\"[^\"]*\"")
SHOWN_ATTRIBUTE = re.compile(r"\b(?:title|alt|placeholder|aria-label|data-announce)=\"([^\"]*)\"")


def retired() -> re.Pattern[str]:
    """The first column of the glossary's last table, with any white space between the words."""
    rows = GLOSSARY.read_text().partition("## Retired words")[2].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ") and " --- " not in row][1:]
    words = [word.split() for cell in cells for word in cell.split(",")]
    return re.compile(r"\b(?:" + "|".join(r"\s+".join(map(re.escape, word)) for word in words) + r")\b", re.IGNORECASE)


def of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Every piece of a string of several words with its line, docstrings left out."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from [(node.lineno, node.value)] if " " in node.value else []


def of_template(path: Path) -> Iterator[tuple[int, str]]:
    """A template's text, the quoted words of its tags, and what its attributes show."""
    text = path.read_text()
    for found in SHOWN_ATTRIBUTE.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found.group(1)
    quoted = TAG.sub(lambda tag: " ".join(QUOTED.findall(tag.group())).join("  "), text)
    yield 0, " ".join(UNSEEN.sub(" ", quoted).split())


def of_document(path: Path) -> Iterator[tuple[int, str]]:
    """Each paragraph of a document."""
    line = 1
    for paragraph in path.read_text().split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


READERS = {".py": of_python, ".html": of_template, ".md": of_document}
PLACES = ["storage_admin", "images", "benchmarks", "templates", "docs", "README.md"]


def read(place: str) -> list[Path]:
    """The files of a place that people read."""
    files = sorted(path for path in (ROOT / place).rglob("*") if path.suffix in READERS) or [ROOT / place]
    return [path for path in files if "migrations" not in path.parts and path != GLOSSARY]


@pytest.mark.parametrize("place", PLACES)
def test_texts_have_no_retired_word(place: str) -> None:
    words, files = retired(), read(place)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {hit.group()!r}"
        for path in files
        for line, text in READERS[path.suffix](path)
        for hit in words.finditer(text)
    ]
    assert files
    assert found == []
