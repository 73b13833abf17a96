"""``manage.py scheduler``: what rings for scans and for all that is due at a time, alone."""

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from storage_admin.supervisor import commands, database
from storage_admin.supervisor.errors import SetupError


class Command(BaseCommand):
    """Waits for the tables, then becomes the scheduler."""

    help = "Runs the scheduler in the foreground, for your own database and Redis. `up` already includes a scheduler."
    requires_system_checks = ()

    def handle(self, *_args: Any, **_options: Any) -> None:
        try:
            database.wait_for_tables(lambda text: print(text, flush=True))
        except SetupError as error:
            self.stderr.write(str(error))
            sys.exit(1)
        commands.become(commands.scheduler(), settings.BASE_DIR)
