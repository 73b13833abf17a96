"""Every refusal that people get reaches a translator: its words stand inside of Django's gettext."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What people do not get as it is: bugs, what is wrong before there are pages, what programs without Django say.
UNSEEN = {
    *dir(builtins),
    "ImproperlyConfigured",
    "SetupError",
    "DemoError",
    "SealError",
    "OperationalError",
    "AppendOnlyError",
    "GoesOnError",
    "LostConnectionError",
    "ContradictedError",
}
TRANSLATED = {"_", "gettext", "gettext_lazy", "ngettext"}
#: The agent knows nothing of Django, and a terminal speaks English.
ELSEWHERE = {"agent", "supervisor", "management", "migrations"}
WORDS = re.compile(r"[a-z]{2,} [a-z]|[A-Z][a-z]+ [a-z]")


def offences(code: str) -> Iterator[int]:
    """The lines on which something is raised with words outside of gettext."""
    for node in ast.walk(ast.parse(code)):
        made = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(made, ast.Call) and ast.unparse(made.func).rpartition(".")[2] not in UNSEEN:
            yield from (text.lineno for text in _words(made))


def _words(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in TRANSLATED:
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORDS.search(node.value):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _words(child)


@pytest.mark.parametrize("place", ["storage_admin", "images", "benchmarks"])
def test_refusals_are_found_by_a_translator(place: str) -> None:
    files = [path for path in (ROOT / place).rglob("*.py") if not ELSEWHERE & set(path.parts)]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in offences(path.read_text())]
    assert files
    assert found == []


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ('raise RefusedError("busy", "Wait until it ends.")', [1]), ('raise errors.HostError(f"{x} is down.")', [1]),
        ('raise InvalidError(_("Give a name."), {"name": "Give a name."})', [1]),
        ('raise InvalidError(_("Give {it}.").format(it=x), {"name": text})', []),
        ('raise RefusedError("busy", ngettext("one job", "many jobs", n))', []),
        ('raise ValueError("no such word")', []),
    ],
)  # fmt: skip
def test_words_outside_of_gettext_are_an_offence(code: str, lines: list[int]) -> None:
    assert list(offences(code)) == lines
