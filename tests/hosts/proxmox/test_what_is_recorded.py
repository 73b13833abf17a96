"""docs/proxmox.md says how much of the product is held against Proxmox VE's own answers; these numbers are true."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.proxmox import schema
from tests.harness.proxmox.recordings import answers, said
from tests.harness.services import ROOT
from tests.hosts.proxmox import test_recorded_answers, test_requests

PAGE = (ROOT / "docs/proxmox.md").read_text()
CHECKS = (test_recorded_answers, test_requests)


def counted() -> dict[str, tuple[int, int]]:
    """By call, how many answers and how many errors are recorded over HTTPS."""
    good, bad = Counter[str](), Counter[str]()
    for one in answers():
        (good if one.status == 200 else bad)[one.call or "others"] += 1
    return {call: (good[call], bad[call]) for call in (*schema.load()["calls"], "others")}


def test_the_table_has_each_call_with_its_answers() -> None:
    found = re.findall(r"^\| (?:`([A-Z]+ [^`]+)`|others) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert {call or "others": (int(good), int(bad)) for call, good, bad in found} == counted()


def test_the_sums_are_true() -> None:
    told = re.search(r"\*\*([\d,]+) recorded answers\*\*, (\d+) over HTTPS and (\d+) of `pvesh`", PAGE)
    assert told is not None
    assert tuple(map(int, told.groups())) == (len(answers()) + len(said()), len(answers()), len(said()))


def test_the_number_of_checks_is_true() -> None:
    told = re.search(r"\*\*(\d+) checks\*\*", PAGE)
    assert told is not None
    assert int(told[1]) == sum(_cases(test) for module in CHECKS for test in vars(module).values()) >= 150


def _cases(test: Any) -> int:
    """How many tests one function is."""
    if not getattr(test, "__name__", "").startswith("test_"):
        return 0
    return math.prod(len(mark.args[1]) for mark in getattr(test, "pytestmark", ()))


@pytest.mark.parametrize("path", sorted(schema.DATA.glob("*.json")), ids=lambda path: path.name)
def test_each_recording_names_the_version(path: Path) -> None:
    content = json.loads(path.read_text())
    assert "9.2" in (content.get("source") or content["about"])
