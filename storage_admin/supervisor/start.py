"""From an empty machine to a running dashboard: checks, preparation, children."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import redis
from redis.exceptions import RedisError

from storage_admin.supervisor import checks, commands, private_redis
from storage_admin.supervisor.child import ChildSpec
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.supervisor import Supervisor

Say = Callable[[str], None]


@dataclass(frozen=True)
class Site:
    """What the settings say. ``redis_url`` is None where a private Redis is wanted."""

    code_dir: Path
    data_dir: Path
    bind: str
    redis_url: str | None


def run(
    site: Site, output: TextIO, *, prepare: Callable[[str, Say], None], ready: Callable[[Say], None],
    watch: Callable[[Say], bool],
) -> None:  # fmt: skip
    """Runs everything until a signal asks to stop.

    Args:
        prepare: before any child runs, with the address of the Redis to come: tables, static files, first rows.
        ready: once the web server answers.
        watch: called about once a second afterwards, until it returns False.

    Raises:
        SetupError: something about this machine is in the way; nothing has been started, or all of it was stopped.
    """
    checks.require_tools(checks.TOOLS)
    checks.parse_bind(site.bind)
    checks.require_writable(site.data_dir)
    lock = checks.lock_folder(site.data_dir)
    checks.require_free_port(site.bind)

    def say(text: str) -> None:
        print(text, file=output, flush=True)

    with _broker(site, lock) as (redis_url, specs):
        prepare(redis_url, say)
        supervisor = Supervisor([*specs, *_dashboard(site, redis_url, lock)], output)
        supervisor.run(lambda: ready(supervisor.say), lambda: watch(supervisor.say))
        supervisor.say("Storage Admin has stopped.")


@contextlib.contextmanager
def _broker(site: Site, lock: int) -> Iterator[tuple[str, list[ChildSpec]]]:
    """The address of Redis, and the child that serves it where it is ours."""
    if site.redis_url is not None:
        _require_redis(site.redis_url)
        yield site.redis_url, []
        return
    checks.require_tools(checks.REDIS_TOOL)
    own = private_redis.prepare(site.data_dir)
    try:
        spec = ChildSpec("redis", own.argv(), own.folder, ready=own.answers, ready_seconds=30, keep_fds=(lock,))
        yield own.url, [spec]
    finally:
        own.remove_short_folder()


def _dashboard(site: Site, redis_url: str, lock: int) -> list[ChildSpec]:
    """Web server, worker and scheduler, in the order of their start.

    Args:
        lock: the descriptor of the data folder's lock, which they share.
    """
    environment = commands.ENVIRONMENT | {
        "REDIS_URL": redis_url,
        "STORAGE_ADMIN_BIND": site.bind,
        "STORAGE_ADMIN_DATA_DIR": str(site.data_dir),
    }
    web = ChildSpec(
        "web", commands.web(site.bind), site.code_dir, environment, ready=lambda: checks.answers(site.bind),
        keep_fds=(lock,),
    )  # fmt: skip
    return [
        web,
        # A worker asked to stop waits for its jobs, however long they take. One that has lost its supervisor is killed:
        # its agents see the end of their input, put everything back and end.
        replace(web, name="worker", argv=commands.worker(), ready=None, death_signal="KILL"),
        replace(web, name="beat", argv=commands.scheduler(), ready=None),
    ]


def _require_redis(url: str) -> None:
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=5, socket_timeout=5) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise SetupError(f"The Redis of REDIS_URL does not answer ({error}). Start it, or unset REDIS_URL.") from error
