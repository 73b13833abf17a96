"""``manage.py up``: starts Storage Admin on this machine and keeps it running until Ctrl-C."""

import os
import sys
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from images import preparing
from images.models import Image
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.brokers import BrokerUrls
from storage_admin.celery import app
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from storage_admin.supervisor.checks import browser_address
from storage_admin.supervisor.commands import typed
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.start import Say, Site, run

#: Seconds after which the first admin's password is said although the first scan goes on.
PASSWORD_PATIENCE = 8.0


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
        begin = Beginning(site.bind)
        try:
            run(site, sys.stdout, prepare=begin.prepare, ready=begin.scan, watch=begin.look)
        except SetupError as error:
            self.stderr.write(str(error))
            sys.exit(1)
        finally:
            begin.say_password(lambda text: print(text, flush=True))


class Beginning:
    """What is done and said around the start of the parts; the first admin's password comes last.

    What the parts say while they start would push it out of sight. So it waits for the first scan, which shows that a
    worker is at work, but not long: on a machine with many images, that scan takes its time.
    """

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._job: Job | None = None
        self._password = ""
        self._patience = 0.0

    def prepare(self, redis_url: str, say: Say) -> None:
        """What a web server needs, and this machine as the host ``local``.

        Raises:
            SetupError: the database cannot be used, or the set-up is not complete.
        """
        app.conf.update(broker_url=BrokerUrls.parse(redis_url).kombu)
        self._password = preparing.prepare(say, local=True)

    def scan(self, say: Say) -> None:
        """Says where the dashboard is, and queues the scan of this machine that every start begins with."""
        self._patience = time.monotonic() + PASSWORD_PATIENCE
        say(f"Storage Admin runs at {browser_address(self._bind)} (Ctrl-C stops it).")
        try:
            host = Host.objects.get(slug="local")
            if transport.is_this_machine(host):
                self._job = submit(SYSTEM, "scan", host.pk, {})
        except (RefusedError, DatabaseError) as error:
            say(f"This machine is not scanned now: {error}")
        finally:
            connections.close_all()

    def look(self, say: Say) -> bool:
        """Waits for the scan's end; where it found no image, says how to get some. True while more may be said."""
        goes_on = self._scan_goes_on(say)
        ended = self._job is not None and not goes_on
        if ended or time.monotonic() > self._patience:
            self.say_password(say)
        return goes_on or bool(self._password)

    def say_password(self, say: Say) -> None:
        """Says it once, where there is one to be said."""
        if self._password:
            say(self._password)
            self._password = ""

    def _scan_goes_on(self, say: Say) -> bool:
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
                say(f"    {typed(f'{settings.COMMAND} demo', settings.DATA_DIR, settings.USUAL_DATA_DIR)}")
        except (Job.DoesNotExist, DatabaseError) as error:
            say(f"The scan of this machine cannot be followed here ({error}); its page shows it.")
        finally:
            connections.close_all()
        return False
