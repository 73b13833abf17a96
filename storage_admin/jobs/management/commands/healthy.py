"""``manage.py healthy web|worker|scheduler``: exit code 0 where that process does its work on this machine.

It is what a container's health check runs, in the same container as the process.
"""

import json
import time
import urllib.error
import urllib.request
from datetime import timedelta
from math import inf
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from storage_admin.jobs import routing, scheduler
from storage_admin.supervisor import checks

#: The scheduler looks every few seconds what is due.
SCHEDULER_SILENCE = timedelta(minutes=2)


class Command(BaseCommand):
    """Looks at one part, and says what is wrong with it."""

    help = "Checks the web server, a worker or the scheduler on this machine: exit code 0 or 1."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("part", choices=["web", "worker", "scheduler"])

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            wrong = {"web": _web, "worker": _worker, "scheduler": _scheduler}[options["part"]]()
        except DatabaseError as error:
            wrong = f"the database cannot be used: {' '.join(str(error).split())}"
        if wrong:
            raise CommandError(wrong)


def _web() -> str:
    """The web server answers, and finds its database and its Redis."""
    request = urllib.request.Request(f"{_address()}healthz", headers=_headers())  # noqa: S310 (our own address)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 503:  # it says so, too, where only a worker is missing, which is not its fault
            return f"the web server answers {error.code}"
        told = json.load(error)
    except (OSError, ValueError) as error:
        return f"the web server does not answer: {error}"
    missing = [name for name in ("database", "broker") if not told.get(name)]
    return f"the web server cannot reach: {', '.join(missing)}" if missing else ""


def _address() -> str:
    """Where the web server listens, as seen from here."""
    address, port = checks.parse_bind(settings.BIND)
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 (compared, not bound)
    return f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"


def _headers() -> dict[str, str]:
    """A name that it answers to; and as by the proxy in front of it, where one speaks TLS."""
    name = next((name for name in settings.ALLOWED_HOSTS if name != "*"), "localhost")
    return {"Host": name.lstrip("."), "X-Forwarded-Proto": "https" if settings.HTTPS else "http"}


def _worker() -> str:
    """A worker on this machine, or in this container, was heard of lately."""
    return "" if routing.alive().filter(place=routing.place()).exists() else "no worker has reported recently"


def _scheduler() -> str:
    """The scheduler has looked lately what is due."""
    try:
        silence = time.time() - scheduler.BEAT.stat().st_mtime
    except FileNotFoundError:
        silence = inf
    return "" if silence < SCHEDULER_SILENCE.total_seconds() else "the scheduler has not run recently"
