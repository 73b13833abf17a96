"""The four processes of Storage Admin as the supervisor starts them."""

from dataclasses import dataclass, replace
from pathlib import Path

from storage_admin.supervisor import commands
from storage_admin.supervisor.checks import answers
from storage_admin.supervisor.child import ChildSpec
from storage_admin.supervisor.private_redis import PrivateRedis


@dataclass(frozen=True)
class Installation:
    """Where this start works: the code, the data, the address, and the lock that children share."""

    code_dir: Path
    data_dir: Path
    bind: str
    redis_url: str
    lock: int


def redis_spec(redis: PrivateRedis, lock: int) -> ChildSpec:
    """The private Redis."""
    return ChildSpec(
        name="redis",
        argv=redis.argv(),
        cwd=redis.folder,
        ready=redis.answers,
        ready_seconds=30,
        keep_fds=(lock,),
    )


def dashboard_specs(installation: Installation) -> list[ChildSpec]:
    """Web server, worker and scheduler, in the order of their start."""
    environment = commands.ENVIRONMENT | {
        "REDIS_URL": installation.redis_url,
        "STORAGE_ADMIN_BIND": installation.bind,
        "STORAGE_ADMIN_DATA_DIR": str(installation.data_dir),
    }
    plain = ChildSpec(
        name="",
        argv=(),
        cwd=installation.code_dir,
        environment=environment,
        keep_fds=(installation.lock,),
    )
    return [
        replace(
            plain,
            name="web",
            argv=commands.web(installation.bind),
            ready=lambda: answers(installation.bind),
        ),
        # A worker asked to stop waits for its jobs, however long they take. One that has lost its supervisor is killed:
        # its agents see the end of their input, put everything back and end.
        replace(plain, name="worker", argv=commands.worker(), death_signal="KILL"),
        replace(plain, name="beat", argv=commands.scheduler()),
    ]
