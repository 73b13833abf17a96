"""The same message many times, two users at once, two schedulers at once: one effect (fault F9)."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import current_app
from django.conf import settings
from django.db import connection
from django.utils import timezone

from images.models import Image
from images.tasks import expire_undo, scan_hosts
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.routing import RUN_JOB
from tests.agent.harness import leftovers, make_image
from tests.factories import HostFactory, ImageFactory, JobFactory
from tests.faults.trials import Trials
from tests.harness.filesystems import new_folder
from tests.harness.services import LiveWorker, RedisServer, database_url
from tests.working import OPERATOR, image_at, register

pytestmark = [pytest.mark.faults, pytest.mark.django_db(transaction=True)]

#: Times that each job is rung for.
MESSAGES = 100
#: Every so many jobs, one rewrites an image: it takes longer.
A_REWRITE_EVERY = 5


@pytest.fixture
def second_worker(live_worker: LiveWorker, redis_server: RedisServer, tmp_path: Path) -> Iterator[LiveWorker]:
    """Another worker beside the first, on the same database and the same Redis."""
    folder = new_folder(tmp_path / "second")
    database = database_url(connection.settings_dict)
    with LiveWorker(folder, Path(settings.DATA_DIR), database, redis_server.url) as worker:
        yield worker


def test_messages_that_come_many_times_to_two_workers_have_one_effect(
    live_worker: LiveWorker, second_worker: LiveWorker, redis_server: RedisServer, pool: Path
) -> None:
    host = HostFactory.create(slug="local")
    register(host, pool)
    image = make_image(pool / "vm.qcow2")
    services.submit(OPERATOR, "scan", host.pk, {})
    settled(live_worker)
    for trial in Trials("F9", "each message a hundred times to two workers", worth=MESSAGES, patience=1):
        with trial:
            if trial.number % A_REWRITE_EVERY == 0:
                job = services.submit(OPERATOR, "check", image_at(image).pk, {"repair": "leaks", "undo_hours": 0})
            else:
                job = services.submit(OPERATOR, "scan", host.pk, {})
            trial.note(job.kind)
            for number in range(MESSAGES - 1):
                current_app.send_task(RUN_JOB, (job.pk,), retry=False, ignore_result=True)
                if number % 40 == 0:
                    time.sleep(trial.rng.uniform(0, 0.1))
            live_worker.wait_for(lambda: not Job.objects.get(pk=job.pk).active, 60, f"the end of {job}")  # noqa: B023
            live_worker.wait_for(lambda: queue_is_empty(redis_server.url), 60, "all messages are taken")
            settled(live_worker)
            job.refresh_from_db()
            assert (job.state, job.generation) == ("succeeded", 1), job.error_detail
            started = list(job.log_lines.filter(text__startswith="started by").values_list("text", flat=True))
            assert started == [f"started by {job.worker}"]
            assert job.log_lines.filter(text__startswith="ended: ").count() == 1
            assert leftovers(pool) == set()
            trial.note(f"done by {'one' if job.worker.endswith(f':{live_worker.pid}') else 'the other'}")


def settled(worker: LiveWorker) -> None:
    worker.wait_for(lambda: not Job.objects.filter(state__in=Job.ACTIVE).exists(), 60, "all jobs end")


def queue_is_empty(url: str) -> bool:
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        return client.llen("celery") == 0


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """What each answers when all begin together; an exception is an answer."""
    ready, answers = threading.Barrier(len(acts)), [None] * len(acts)

    def run(number: int) -> None:
        ready.wait()
        try:
            answers[number] = acts[number]()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            answers[number] = error  # type: ignore[call-overload]
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.usefixtures("quiet")
def test_two_users_who_rewrite_one_image_at_once_get_one_job_and_one_refusal() -> None:
    host = HostFactory.create()
    for trial in Trials("F9", "two users rewrite one image at once", part=1 / 50):
        with trial:
            image = ImageFactory.create(pool__host=host)
            kinds = trial.rng.choices(
                [("reclaim", {}), ("check", {"repair": "leaks"}), ("reclaim", {"undo_hours": 0})], k=2
            )
            acts = [lambda one=one: services.submit(OPERATOR, one[0], image.pk, one[1]) for one in kinds]  # noqa: B023
            answers = at_once(*acts)
            (job,) = [answer for answer in answers if isinstance(answer, Job)]
            (refusal,) = [answer for answer in answers if isinstance(answer, RefusedError)]
            assert refusal.code == "busy"
            assert list(Job.objects.filter(target_kind="image", target_id=image.pk)) == [job]
            claimed = at_once(lambda: claims.claim(job.pk, "w1"), lambda: claims.claim(job.pk, "w2"))  # noqa: B023
            assert sorted(type(answer).__name__ for answer in claimed) == ["Job", "NoneType"], claimed
            job.refresh_from_db()
            assert (job.state, job.generation) == ("running", 1)
            Job.objects.all().delete()
            Image.every.all().delete()


@pytest.mark.usefixtures("quiet")
def test_two_schedulers_at_once_have_one_effect() -> None:
    for trial in Trials("F9", "two schedulers at once", part=1 / 50):
        with trial:
            host = HostFactory.create()
            image = ImageFactory.create(pool__host=host)
            what = trial.rng.choice(["scan", "reap", "expire"])
            trial.note(what)
            if what == "scan":
                answers = at_once(scan_hosts, scan_hosts)
                kind = "scan"
            elif what == "reap":
                lost = JobFactory.create(kind="reclaim", target=image, state="running", generation=1, heartbeat=None)
                answers = at_once(reaper.reap, reaper.reap)
                lost.refresh_from_db()
                assert sorted(answers) == [0, 1]
                assert (lost.state, lost.generation) == ("interrupted", 2)
                assert lost.log_lines.filter(text__startswith="interrupted").count() == 1
                kind = "recover"
            else:
                JobFactory.create(
                    kind="reclaim", target=image, state="succeeded", undo_state="available", undo_bytes=1,
                    undo_expires=timezone.now() - timedelta(hours=1),
                )  # fmt: skip
                answers = at_once(expire_undo, expire_undo)
                kind = "discard_undo"
            assert not [answer for answer in answers if isinstance(answer, Exception)], answers
            assert Job.objects.filter(kind=kind, state="queued").count() == 1
            Host.objects.all().delete()
