"""``manage.py up`` itself: what it refuses, what it starts, and that it takes all of it along."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from storage_admin.supervisor import commands
from tests.harness.filesystems import mounted, new_folder, new_program
from tests.harness.processes import Daemon, free_port, wait_until
from tests.harness.services import Dashboard, environment_of, running_dashboard

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
UP = [sys.executable, "manage.py", "up"]


def up(data_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``manage.py up`` where it must refuse to start."""
    env = environment_of(data_dir) | {"STORAGE_ADMIN_BIND": f"127.0.0.1:{free_port()}"} | environment
    return subprocess.run(UP, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    """Exit code 1 and one line that says it."""
    assert done.returncode == 1
    said = done.stderr.strip()
    assert re.search(sentence, said), said
    assert "\n" not in said, said
    assert done.stdout == "", "nothing was started"


def children_of(dashboard: Dashboard) -> list[psutil.Process]:
    """All that the supervisor has started, and what these have started."""
    return psutil.Process(dashboard.pid).children(recursive=True)


def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def without(tool: str, folder: Path) -> str:
    """A PATH with what the start needs except one tool."""
    folder.mkdir()
    for name in {"sh", "setpriv", "qemu-img", "redis-server"} - {tool}:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


def test_a_port_in_use_ends_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = up(tmp_path / "data", STORAGE_ADMIN_BIND=f"127.0.0.1:{port}")
    assert_refused(done, rf"^Port {port} on 127\.0\.0\.1 is in use\. ")
    assert not (tmp_path / "data" / "db.sqlite3").exists()


def test_a_database_that_was_emptied_is_no_first_start(tmp_path: Path) -> None:
    data = new_folder(tmp_path / "data", mode=0o700)
    (data / "secret_key").write_text("x" * 50)
    (data / "db.sqlite3").touch()
    assert_refused(up(data), r"^The database .*db\.sqlite3 is empty, but .* \(secret_key\)")
    assert (data / "db.sqlite3").stat().st_size == 0


def test_an_empty_secret_key_ends_with_a_sentence_and_is_not_made_anew(tmp_path: Path) -> None:
    data = new_folder(tmp_path / "data", mode=0o700)
    (data / "secret_key").touch()
    assert_refused(up(data), r"secret_key is empty\. ")
    assert (data / "secret_key").read_text() == ""


@pytest.mark.parametrize("kib", [16, 3000])
def test_a_full_data_disk_ends_with_a_sentence(tmp_path: Path, kib: int) -> None:
    with mounted("tmpfs", new_folder(tmp_path / "disk"), "-t", "tmpfs", "-o", f"size={kib}k,mode=700") as disk:
        done = up(new_folder(disk / "data", mode=0o700))
    assert_refused(done, "^The disk is full .* Free some space")


def test_a_malformed_address_ends_with_a_sentence(tmp_path: Path) -> None:
    assert_refused(up(tmp_path / "data", STORAGE_ADMIN_BIND="here"), "^STORAGE_ADMIN_BIND is 'here', which is no addr")


@pytest.mark.parametrize("tool", ["setpriv", "qemu-img", "redis-server"])
def test_a_missing_tool_ends_with_a_sentence(tmp_path: Path, tool: str) -> None:
    done = up(tmp_path / "data", PATH=without(tool, tmp_path / "bin"))
    assert_refused(done, rf"^{tool} is missing: .*apt install ")


@pytest.mark.parametrize("secret", [{}, {"SECRET_KEY": "given"}])
def test_an_unwritable_data_folder_ends_with_a_sentence(tmp_path: Path, secret: dict[str, str]) -> None:
    (tmp_path / "file").touch()
    assert_refused(up(tmp_path / "file" / "data", **secret), r"^The data folder \S+/file/data cannot be used ")


def test_a_redis_that_does_not_answer_ends_with_a_sentence(tmp_path: Path) -> None:
    done = up(tmp_path / "data", REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    assert_refused(done, r"^The Redis of REDIS_URL does not answer \(.*\)\. Start it, or unset REDIS_URL\.$")


def test_a_database_that_does_not_answer_ends_with_a_sentence(tmp_path: Path) -> None:
    done = up(tmp_path / "data", DATABASE_URL=f"postgres://nobody@127.0.0.1:{free_port()}/nothing")
    assert_refused(done, r"^The database of DATABASE_URL cannot be used: .*refused")


def all_of_it(dashboard: Dashboard) -> list[psutil.Process]:
    """The four services with their own processes, each of them seen to be there."""
    children = children_of(dashboard)
    commands = [process.cmdline() for process in children]
    for part in ("redis-server", "gunicorn", "worker", "beat"):
        assert any(part in " ".join(command) for command in commands), (part, commands)
    return children


def test_one_signal_stops_everything(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running_dashboard(data_dir) as dashboard:
        running = all_of_it(dashboard)
        assert_refused(up(data_dir), rf"already runs on {re.escape(str(data_dir))} \(process {dashboard.pid}\)")
        dashboard.daemon.process.send_signal(signal.SIGINT)
        assert dashboard.daemon.process.wait(40) == 0
    said = dashboard.daemon.said()
    assert said.rstrip().endswith("Storage Admin has stopped.")
    assert [word for word in ("killed", "Traceback") if word in said] == []
    assert still_there(running) == []
    assert said.count(dashboard.printed) == 1
    assert open_to_others(data_dir) == []


def open_to_others(data_dir: Path) -> list[str]:
    """What of a data folder others than its owner may read or write: not the agent, which is no secret, nor symbolic
    links, which have no mode of their own.
    """
    found = [data_dir, *(path for path in data_dir.rglob("*") if path.suffix != ".pyz")]
    return [str(path) for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]


@pytest.mark.parametrize(
    ("data_dir", "typed"),
    [
        ("/srv/app/var", "make run"),
        ("/srv/data", "STORAGE_ADMIN_DATA_DIR=/srv/data make run"),
        ("/srv/my data; id", "STORAGE_ADMIN_DATA_DIR='/srv/my data; id' make run"),
    ],
)
def test_a_printed_command_names_the_data_folder_unless_it_is_the_usual_one(data_dir: str, typed: str) -> None:
    assert commands.typed("make run", Path(data_dir), Path("/srv/app/var")) == typed


def test_the_first_password_is_the_last_thing_that_is_said_once_all_is_up(tmp_path: Path) -> None:
    data_dir = tmp_path / "with a space" / "data"
    with running_dashboard(data_dir) as dashboard:
        all_of_it(dashboard)
        time.sleep(3)
        said = [line for line in dashboard.daemon.said().split("\n") if line]
        (at,) = [number for number, line in enumerate(said) if dashboard.printed in line]
        (runs,) = [number for number, line in enumerate(said) if f"runs at {dashboard.url}/" in line]
        assert runs < at
        # Only a first scan that takes long has anything to say after it.
        assert not [line for line in said[at + 1 :] if " | " in line], said
        hints = [line.strip() for line in said if "manage.py demo" in line]
        assert hints in ([], [f"STORAGE_ADMIN_DATA_DIR='{data_dir}' .venv/bin/python manage.py demo"])


def test_a_start_that_fails_after_the_first_admin_was_made_still_tells_the_password(tmp_path: Path) -> None:
    """It is told by nothing else, ever."""
    broken = tmp_path / "bin"
    without("redis-server", broken)
    new_program(broken / "redis-server", "#!/bin/sh\nexit 1\n")
    env = environment_of(tmp_path / "data") | {"STORAGE_ADMIN_BIND": f"127.0.0.1:{free_port()}", "PATH": str(broken)}
    with Daemon(UP, tmp_path / "up.log", env=env, cwd=ROOT, grace=40) as daemon:
        daemon.wait_for(lambda: "redis ended unexpectedly" in daemon.said(), 60, "the Redis fails")
        assert "password" not in daemon.said()
        daemon.stop()
        assert daemon.said().count("Log in as admin with the password ") == 1


def test_killing_it_leaves_nothing_behind_and_the_next_start_keeps_the_password(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running_dashboard(data_dir) as dashboard:
        running = all_of_it(dashboard)
        os.kill(dashboard.pid, signal.SIGKILL)
        dashboard.daemon.process.wait(5)
        wait_until(lambda: not still_there(running), 15, "its children have ended")
        env = environment_of(data_dir) | {"STORAGE_ADMIN_BIND": dashboard.url[7:]}
        with Daemon(UP, tmp_path / "second.log", env=env, cwd=ROOT, grace=40) as second:
            second.wait_for(lambda: f"runs at {dashboard.url}/" in second.said(), 60, "the second start")
            assert "password" not in second.said()
            assert second.stop() == 0
    assert still_there(running) == []


def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    with running_dashboard(tmp_path / "data") as dashboard:
        (worker,) = [process for process in all_of_it(dashboard) if "worker" in process.cmdline()]
        worker.kill()
        dashboard.daemon.wait_for(lambda: "worker was started again." in dashboard.daemon.said(), 20, "a new worker")
    assert "worker ended unexpectedly (killed by SIGKILL); it starts again in 1 s." in dashboard.daemon.said()
