"""A storage on a network filesystem whose server can be stopped, beside one on a disk of this machine.

Its fixtures are ``far_server``, ``near`` and ``far_host``; ``tests/conftest.py`` names it as a plugin.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from images.models import Image
from storage_admin.hosts.models import Host
from tests.harness.processes import Daemon
from tests.harness.sshd import sshd
from tests.working import create, scan, this_machine

#: Seconds from the start of the server on after which it always answers.
SILENT_FOR = 240


@pytest.fixture
def far_server(tmp_path: Path) -> Iterator[Daemon]:
    """What answers for the files in ``far``, which has an image; its own files are in ``export``."""
    export, far = tmp_path / "export", tmp_path / "far"
    export.mkdir()
    far.mkdir()
    create(export / "away.qcow2")
    with sshd(tmp_path / "sshd", "Subsystem sftp internal-sftp") as other:
        key = tmp_path / "key"
        key.write_text(other.private_key)
        key.chmod(0o600)
        options = f"IdentityFile={key},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,cache=no"
        argv = ["sshfs", "-f", "-p", str(other.port), "-o", options, f"root@127.0.0.1:{export}", str(far)]
        with Daemon(argv, tmp_path / "sshfs.log") as daemon, _never_silent_for_long(daemon.pid):
            try:
                daemon.wait_for((far / "away.qcow2").exists, 20, "the files are there")
                yield daemon
            finally:
                if psutil.pid_exists(daemon.pid):
                    psutil.Process(daemon.pid).resume()
                subprocess.run(["umount", "-l", far], check=False)


@contextlib.contextmanager
def _never_silent_for_long(server: int) -> Iterator[None]:
    """Another process has the server answer after some minutes, whoever has stopped it: a test that waits for what
    cannot end meanwhile fails then, where it would wait for itself for ever.
    """
    resumes = f"time.sleep({SILENT_FOR})\nwhile True: os.kill({server}, signal.SIGCONT); time.sleep(1)"
    watch = subprocess.Popen([sys.executable, "-c", f"import os, signal, time\n{resumes}"])
    try:
        yield
    finally:
        watch.kill()
        watch.wait()


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """An image on a disk of this machine."""
    (tmp_path / "near").mkdir()
    return create(tmp_path / "near/here.qcow2")


@pytest.fixture
def far_host(far_server: Daemon, near: Path) -> Host:
    """This machine, scanned while all is well, with a process that has an image open there."""
    far = near.parent.parent / "far"
    # A folder that a walk comes by, on the way to the one that hangs.
    host = this_machine(near.parent, far, far.parent / "around")
    (far.parent / "around").mkdir()
    scan(host)
    assert set(Image.objects.values_list("name", "state")) == {("away.qcow2", "ok"), ("here.qcow2", "ok")}
    return host


@contextlib.contextmanager
def answering_again(server: Daemon) -> Iterator[None]:
    """Whatever happens, the server answers afterwards: nobody could even close a file of it."""
    try:
        yield
    finally:
        psutil.Process(server.pid).resume()
