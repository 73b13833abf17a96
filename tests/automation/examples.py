"""The examples of docs/automation.md, taken out of the page and run as somebody would who copies them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.harness.services import ROOT

PAGE = ROOT / "docs" / "automation.md"


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in the page's order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run(language: str, folder: Path, **environment: str) -> str:
    """Runs all blocks of a language as one program, and tells what it printed.

    Raises:
        AssertionError: it failed; with what it said.
    """
    # errexit does not see what fails within a pipe's left side or a substitution; a page's reader would.
    begin = {"sh": "set -eu -o pipefail\nshopt -s inherit_errexit\n", "python": ""}[language]
    program = folder / f"examples.{language}"
    program.write_text(begin + "\n".join(blocks(language)))
    argv = ["bash", "-x", str(program)] if language == "sh" else [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
