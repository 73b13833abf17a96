"""``manage.py web``: the web server alone, for a database and a Redis of yours."""

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from images import preparing
from storage_admin.supervisor import checks, commands
from storage_admin.supervisor.errors import SetupError


class Command(BaseCommand):
    """Makes tables and files for the browser, then becomes the web server."""

    help = "Runs the web server in the foreground, for a database and a Redis of yours; `up` has one of its own."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--workers",
            type=int,
            default=commands.WEB_WORKERS,
            help=f"processes, each with {commands.WEB_THREADS} threads (default: {commands.WEB_WORKERS})",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            checks.parse_bind(settings.BIND)
            checks.require_writable(settings.DATA_DIR)
            if password := preparing.prepare(self._say, local=False):
                self._say(password)
        except SetupError as error:
            self.stderr.write(str(error))
            sys.exit(1)
        commands.become(commands.web(settings.BIND, options["workers"], "info"), settings.BASE_DIR)

    def _say(self, text: str) -> None:
        print(text, flush=True)
