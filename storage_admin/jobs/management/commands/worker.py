"""``manage.py worker``: one more worker, beside those that are there."""

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser


class Command(BaseCommand):
    help = "Runs a worker in the foreground, for a database and a Redis of yours; `up` has one of its own."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--threads", type=int, default=32, help="jobs that it carries at once (default: 32)")

    def handle(self, *_args: Any, **options: Any) -> None:
        celery = [sys.executable, "-m", "celery", "--quiet", "--app", "storage_admin.celery", "worker"]
        how = ["--pool", "threads", "--concurrency", str(options["threads"]), "--without-gossip", "--without-mingle"]
        os.execv(celery[0], [*celery, *how, "--loglevel", "info"])  # noqa: S606 (no shell: an argument list)
