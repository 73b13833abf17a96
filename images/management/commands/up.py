"""``manage.py up``: starts Storage Admin on this machine and keeps it running until Ctrl-C."""

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from images.models import Image
from storage_admin.accounts.roles import SYSTEM
from storage_admin.accounts.services import ensure_first_admin
from storage_admin.agent.protocol import RefusedError
from storage_admin.brokers import BrokerUrls
from storage_admin.celery import app
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import ensure_local_host
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from storage_admin.supervisor.checks import browser_address
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.start import Hooks, Say, Site, run
from storage_admin.supervisor.static_files import collect_if_changed


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
    """Tables, files for the browser, this machine as a host, and the first admin.

    Raises:
        SetupError: the database cannot be used, or the set-up is not complete.
    """
    app.conf.update(broker_url=BrokerUrls.parse(redis_url).kombu)
    collect_if_changed(settings.DATA_DIR / "static.stamp")
    try:
        call_command("migrate", interactive=False, verbosity=0)
        ensure_local_host()
        password = ensure_first_admin()
    except DatabaseError as error:
        said = " ".join(str(error).split())
        raise SetupError(f"The database of DATABASE_URL cannot be used: {said}") from error
    if password is not None:
        say(f"First start. Log in as admin with the password {password} (it is shown only this once).")
    connections.close_all()


class FirstScan:
    """The scan of this machine that every start begins with."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._job: Job | None = None

    def begin(self, say: Say) -> None:
        """Says where the dashboard is, and queues the scan."""
        say(f"Storage Admin runs at {browser_address(self._bind)} (Ctrl-C stops it).")
        try:
            self._job = submit(SYSTEM, "scan", Host.objects.get(slug="local").pk, {})
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
