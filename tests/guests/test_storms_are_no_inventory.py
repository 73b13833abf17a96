"""What a boot storm makes and starts is nobody's image and nobody's guest, whichever dashboard started it."""

import json
from typing import Any

import pytest

from storage_admin.agent.folders import scratch
from storage_admin.agent.protocol import b64
from storage_admin.agent.verbs import scan
from storage_admin.hosts.libvirt import reader


def domain(name: str, *paths: str) -> dict[str, Any]:
    disks = [
        {"target": f"vd{letter}", "device": "disk", "path": path, "volume": "", "format": "qcow2", "cache": "",
         "discard": "", "readonly": False}
        for letter, path in zip("abcd", paths, strict=False)
    ]  # fmt: skip
    of_it = {"kind": "domain", "uid": name, "name": name, "state": "running"}
    return {**of_it, "disks": disks, "unread": [], "snapshots": []}


@pytest.mark.parametrize(
    ("told", "listed"),
    [
        (domain("sa-bench-0a1B-0", "/pool/.sa-0a1B.bench/guest-0.qcow2"), False),
        (domain("sa-bench-0a1B-11", "/elsewhere/deep/.sa-0a1B.bench/guest-11.raw"), False),
        (domain("web-01", "/pool/.sa-0a1B.bench/guest-0.qcow2"), True),
        (domain("sa-bench-0a1B-0", "/pool/.sa-other.bench/guest-0.qcow2"), True),
        (domain("sa-bench-0a1B-0", "/pool/.sa-0a1B.bench/guest-0.qcow2", "/pool/data.qcow2"), True),
        (domain("sa-bench-0a1B-0", "/pool/data.qcow2"), True),
        (domain("sa-bench-0a1B-0"), True),
    ],
)
def test_domains_of_a_storm_are_not_told(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], listed: bool) -> None:
    answer = json.loads(json.dumps({"pools": [], "domains": [told], "about": {}}))
    monkeypatch.setattr(reader, "ask", lambda *_args, **_more: answer)
    assert bool(reader._read("test:///default").domains) == listed


@pytest.mark.parametrize(
    ("path", "held"),
    [
        (b"/pool/.sa-0a1B.bench/guest-0.raw", True),
        (b"/pool/.sa-0a1B.bench/deep/x", True),
        (b"/pool/.sa-0a1B.bench", False),
        (b"/pool/.sa-0a1B.benches/x", False),
        (b"/pool/x.bench/y", False),
        (b"/pool/web.qcow2", False),
    ],
)
def test_what_a_guest_names_in_a_benchmarks_folder_is_not_listed(path: bytes, held: bool) -> None:
    assert scratch.holds(path) == held
    args = scan._parse({"pools": [], "named_b64": [b64(path), b64(b"/pool/other.raw")]})
    assert args.named == {b"/pool/other.raw"} | (set() if held else {path})
