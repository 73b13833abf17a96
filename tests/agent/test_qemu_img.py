"""What is asked of a host's qemu-img is asked once, and again after an upgrade."""

import os
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.agent.qemu import node
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_program


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A qemu-img that stands first in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "qemu-img"


def install(tool: Path, says: str) -> None:
    new = new_program(tool.with_name("new"), f"#!/bin/sh\necho '{says}'\n")
    new.replace(tool)


def test_the_version_is_asked_once_and_again_after_an_upgrade(tool: Path) -> None:
    io = RecordingIO()
    install(tool, "qemu-img version 5.0.1 (Debian)")
    assert [node.version(io), node.version(io)] == [(5, 0), (5, 0)]
    assert not node.supports_zstd(io)  # so old a one is not asked
    assert len(io.all("command")) == 1
    install(tool, "qemu-img version 10.2.0")
    assert node.version(io) == (10, 2)
    assert [node.supports_zstd(io), node.supports_zstd(io)] == [True, True]
    assert len(io.all("command")) == 2


def test_a_qemu_img_that_does_not_say_its_version_is_an_error_each_time(tool: Path) -> None:
    install(tool, "hello")
    for _ in range(2):
        with pytest.raises(HostError, match="does not say its version"):
            node.version(RecordingIO())
