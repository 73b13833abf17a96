"""What is looked at before anything is started: each finding is one sentence that says what to do."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage_admin.supervisor import checks
from storage_admin.supervisor.errors import SetupError
from tests.harness.filesystems import new_folder, new_program
from tests.harness.processes import free_port


def test_names_a_missing_tool_its_purpose_and_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"^redis-server is missing: .*worker.* apt install redis-server$"):
        checks.require_tools(checks.REDIS_TOOL)
    new_program(tmp_path / "redis-server", "#!/bin/sh\n")
    checks.require_tools(checks.REDIS_TOOL)


def test_makes_the_data_folder_for_its_owner_alone(tmp_path: Path) -> None:
    checks.require_writable(tmp_path / "a" / "data")
    assert (tmp_path / "a" / "data").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "a" / "data").iterdir()) == []


def test_refuses_a_data_folder_beneath_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/data cannot be used \(Not a directory\)\. Make it writable or set STO"):
        checks.require_writable(tmp_path / "file" / "data")


def test_refuses_a_data_folder_that_takes_no_file() -> None:
    with pytest.raises(SetupError, match="/proc cannot be used"):
        checks.require_writable(Path("/proc"))


def test_closes_a_data_folder_that_others_can_read_and_what_an_earlier_version_left_open_in_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "data")
    for name, mode in (("db.sqlite3", 0o644), ("secret_key", 0o600), ("script", 0o755)):
        (folder / name).touch()
        (folder / name).chmod(mode)
    (folder / "elsewhere").symlink_to(tmp_path / "file")
    (tmp_path / "file").touch(mode=0o644)
    folder.chmod(0o755)
    checks.require_writable(folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"data": 0o700, "db.sqlite3": 0o600, "secret_key": 0o600, "script": 0o700, "elsewhere": 0o644}


def test_refuses_a_data_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SetupError, match=rf"belongs to another user \(uid {owner}, not {owner + 1}\).* chown -R"):
        checks.require_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_refuses_a_data_folder_on_which_another_process_works(tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from storage_admin.supervisor.checks import lock_folder; "
    hold += "lock_folder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        started = time.monotonic()
        with pytest.raises(SetupError, match=rf"already runs on {re.escape(str(tmp_path))} \(process {other.pid}\)\."):
            checks.lock_folder(tmp_path)
        assert time.monotonic() - started < 1, "a live holder is not waited for"
        other.kill()
    os.close(checks.lock_folder(tmp_path))


def test_waits_for_the_children_of_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "up.lock").write_text("4194999\n")  # above the largest process number
    with (tmp_path / "up.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(["sleep", "1"], pass_fds=(held.fileno(),)):
            held.close()
            started = time.monotonic()
            os.close(checks.lock_folder(tmp_path))
            assert 0.5 < time.monotonic() - started < 10


def test_gives_up_on_children_of_an_earlier_start_that_do_not_end(tmp_path: Path) -> None:
    (tmp_path / "up.lock").write_text("4194999\n")
    with (tmp_path / "up.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match="a process of an earlier start that has not ended yet"):
            checks.lock_folder(tmp_path, patience_seconds=0.3)


def test_a_port_in_use_is_named_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"^Port {port} on 127\.0\.0\.1 is in use\. .*STORAGE_ADMIN_BIND="):
            checks.require_free_port(f"127.0.0.1:{port}")
        assert checks.answers(f"127.0.0.1:{port}")
        assert checks.answers(f"0.0.0.0:{port}"), "listening everywhere includes the loopback address"
    checks.require_free_port(f"127.0.0.1:{port}")
    assert not checks.answers(f"127.0.0.1:{port}")


def test_an_address_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(SetupError, match=r"^Nothing can listen on 192\.0\.2\.1:8000"):
        checks.require_free_port("192.0.2.1:8000")


@pytest.mark.parametrize("bind", ["", "8000", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "h:0", "h:65536", "h:-1"])
def test_refuses_what_is_no_address_and_port(bind: str) -> None:
    with pytest.raises(SetupError, match="which is no address and port such as"):
        checks.parse_bind(bind)


@pytest.mark.parametrize(
    ("bind", "address", "browser"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000), "http://127.0.0.1:8000/"),
        ("[::1]:8000", ("::1", 8000), "http://[::1]:8000/"),
        ("0.0.0.0:80", ("0.0.0.0", 80), f"http://{socket.gethostname()}:80/"),
        (":80", ("0.0.0.0", 80), f"http://{socket.gethostname()}:80/"),
    ],
)
def test_reads_an_address_and_tells_what_to_type_into_a_browser(
    bind: str, address: tuple[str, int], browser: str
) -> None:
    assert checks.parse_bind(bind) == address
    assert checks.browser_address(bind) == browser


def test_listens_on_ipv6(tmp_path: Path) -> None:
    checks.require_free_port(f"[::1]:{free_port()}")
