"""``manage.py up``: starts Storage Admin on this machine and keeps it running until Ctrl-C."""

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from images import preparing
from images.models import Image
from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.brokers import BrokerUrls
from storage_admin.celery import app
from storage_admin.hosts import machine
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from storage_admin.supervisor.checks import browser_address
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.start import Hooks, Say, Site, run


class Command(BaseCommand):
    """Web server, worker, scheduler and a private Redis in one process group tree, ended by one Ctrl-C."""

    help = "Starts web server, worker, scheduler and (unless REDIS_URL is set) a private Redis; Ctrl-C stops them."
    requires_system_checks = ()

    def handle(self, *_args: Any, **_options: Any) -> None:
        site = Site(
            code_dir=settings.BASE_DIR,
            data_dir=settings.DATA_DIR,
            bind=settings.BIND,
            redis_url=os.environ.get("REDIS_URL") or None,
        )
        scan = FirstScan(site.bind)
        try:
            run(site, Hooks(prepare=prepare, ready=scan.begin, watch=scan.look), sys.stdout)
        except SetupError as error:
            self.stderr.write(str(error))
            sys.exit(1)


def prepare(redis_url: str, say: Say) -> None:
    """What a web server needs, and this machine as the host ``local``.

    Raises:
        SetupError: the database cannot be used, or the set-up is not complete.
    """
    app.conf.update(broker_url=BrokerUrls.parse(redis_url).kombu)
    preparing.prepare(say, local=True)


class FirstScan:
    """The scan of this machine that every start begins with."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._job: Job | None = None

    def begin(self, say: Say) -> None:
        """Says where the dashboard is, and queues the scan."""
        say(f"Storage Admin runs at {browser_address(self._bind)} (Ctrl-C stops it).")
        try:
            host = Host.objects.get(slug="local")
            if machine.is_this(host):
                self._job = submit(SYSTEM, "scan", host.pk, {})
        except (RefusedError, DatabaseError) as error:
            say(f"This machine is not scanned now: {error}")
        finally:
            connections.close_all()

    def look(self, say: Say) -> bool:
        """Waits for the scan's end; where it found no image, says how to get some. True while it goes on."""
        if self._job is None:
            return False
        try:
            self._job.refresh_from_db()
            if self._job.active:
                return True
            if self._job.state != Job.State.SUCCEEDED:
                say(f"The scan of this machine has {self._job.state}: {self._job.error_detail or 'see its log'}")
            elif not Image.objects.exists():
                say("No disk images were found on this machine. Demo images, real ones in a folder of their own:")
                say("    .venv/bin/python manage.py demo")
        except (Job.DoesNotExist, DatabaseError) as error:
            say(f"The scan of this machine cannot be followed here ({error}); its page shows it.")
        finally:
            connections.close_all()
        return False
