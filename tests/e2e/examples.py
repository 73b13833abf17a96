"""The examples of pages of docs/, taken out of the page and run as somebody would who copies them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.services import ROOT

DOCS = ROOT / "docs"
#: Has the examples, and in its first block the shell function that other pages' examples use too.
PAGE = "automation.md"


def blocks(language: str, page: str = PAGE) -> list[str]:
    """The code blocks of a language, in the page's order."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(language: str, folder: Path, page: str = PAGE, **environment: str) -> str:
    """Runs all blocks of a language as one program, and tells what it printed.

    Raises:
        AssertionError: it failed; with what it said.
    """
    # errexit does not see what fails within a pipe's left side or a substitution; a page's reader would.
    begin = {"sh": "set -eu -o pipefail\nshopt -s inherit_errexit\n", "python": ""}[language]
    helpers = [] if page == PAGE else blocks(language)[:1]
    program = folder / f"examples.{language}"
    program.write_text(begin + "\n".join([*helpers, *blocks(language, page)]))
    argv = ["bash", "-x", str(program)] if language == "sh" else [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
