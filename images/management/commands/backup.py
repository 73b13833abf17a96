"""``manage.py backup FILE``: database, keys and the list of undo copies in one file."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from images.selectors.undo_copies import kept_on_hosts
from storage_admin.supervisor import backups
from storage_admin.supervisor.errors import SetupError


class Command(BaseCommand):
    help = "Writes database, keys and the list of undo copies into one new file, while the dashboard may run."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)

    def handle(self, *_args: Any, **options: Any) -> None:
        database = Path(connection.settings_dict["NAME"]) if connection.vendor == "sqlite" else None
        copies = kept_on_hosts()
        try:
            held = backups.write(options["file"].absolute(), settings.DATA_DIR, database, copies)
        except (SetupError, OSError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{options['file']} has {', '.join(held)}. It opens every host: keep it safe.")
        if database is None:
            self.stdout.write("The database is PostgreSQL's: save it with pg_dump as well.")
        if copies:
            self.stdout.write(f"{len(copies)} undo copies stay beside their images on the hosts; the file lists them.")
