"""No text that Python code shows to a user has a word that the glossary has retired."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    "images/kinds", "images/rewrite", "images/orphans", "images/policies", "images/alert_rules", "images/api",
    "benchmarks", "storage_admin/web", "storage_admin/api", "storage_admin/events",
]  # fmt: skip
RETIRED = re.compile(
    r"\b(?:wins? back|won back|would win|be won|was won|were won|won less|dig(?:ging)? holes|stands? on|begun|so many"
    r"|whoever|is told|told of|runs? in a circle|comes back to itself|nobody needs|asked by|promises|lets us in)\b",
    re.IGNORECASE,
)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every piece of a string with its line, docstrings left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_have_no_retired_word(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if "migrations" not in path.parts]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        for line, text in texts(ast.parse(path.read_text()))
        if " " in text and RETIRED.search(text)
    ]
    assert files
    assert found == []
