"""The private Redis, with the real redis-server."""

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage_admin.brokers import BrokerUrls
from storage_admin.supervisor import private_redis
from storage_admin.supervisor.private_redis import PrivateRedis
from tests.harness.filesystems import new_folder
from tests.harness.processes import Daemon

pytestmark = pytest.mark.services


@contextlib.contextmanager
def running(own: PrivateRedis, log: Path) -> Iterator[Daemon]:
    with Daemon(own.argv(), log, cwd=own.folder) as daemon:
        daemon.wait_for(own.answers, 20, "it answers")
        yield daemon


def client(own: PrivateRedis) -> redis.Redis:
    return redis.Redis.from_url(BrokerUrls.parse(own.url).redis, decode_responses=True)


def test_listens_on_a_socket_of_its_owner_and_on_no_port(tmp_path: Path) -> None:
    own = private_redis.prepare(tmp_path)
    with running(own, tmp_path / "log"), client(own) as link:
        settings = link.config_get("*")
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        assert {name: settings[name] for name in wanted} == wanted
        assert settings["dir"] == str(tmp_path / "redis")
        assert stat.S_IMODE(own.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(own.folder.stat().st_mode) == 0o700
    assert own.socket == tmp_path / "redis" / "redis.sock"
    assert own.short_folder is None


def test_keeps_what_it_was_told_through_a_kill(tmp_path: Path) -> None:
    own = private_redis.prepare(tmp_path)
    with running(own, tmp_path / "log") as daemon, client(own) as link:
        link.config_set("appendfsync", "always")
        link.rpush("celery", "1")
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait(10)
    assert own.socket.exists(), "the kill left its socket behind"
    again = private_redis.prepare(tmp_path)
    with running(again, tmp_path / "log"), client(again) as link:
        assert link.lrange("celery", 0, -1) == ["1"]


@pytest.mark.parametrize("name", ["with space", 'quote"d', "back\\slash", "ümläut", "#hash", "$HOME", "new\nline"])
def test_works_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    own = private_redis.prepare(tmp_path / name)
    with running(own, tmp_path / "log"):
        assert own.answers()
    assert (tmp_path / name / "redis" / "appendonlydir").is_dir()


def test_a_socket_path_that_is_too_long_moves_to_a_short_private_folder(tmp_path: Path) -> None:
    deep = new_folder(tmp_path / ("d" * 120))
    own = private_redis.prepare(deep)
    assert own.short_folder is not None
    assert len(os.fsencode(own.socket)) <= 107
    assert stat.S_IMODE(own.short_folder.stat().st_mode) == 0o700
    with running(own, tmp_path / "log"), client(own) as link:
        assert link.ping()
    own.remove_short_folder()
    assert not own.short_folder.exists()


@pytest.mark.parametrize("length", [106, 107, 108])
def test_the_longest_path_that_fits_is_used(tmp_path: Path, length: int) -> None:
    missing = length - len(os.fsencode(tmp_path / "redis" / "redis.sock")) - 1
    assert missing > 0, "the temporary folder is too deep for this test"
    folder = new_folder(tmp_path / ("d" * missing))
    own = private_redis.prepare(folder)
    assert (own.short_folder is None) == (length <= 107)
    with running(own, tmp_path / "log"):
        assert own.answers()
    own.remove_short_folder()
