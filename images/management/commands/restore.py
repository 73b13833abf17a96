"""``manage.py restore FILE``: a backup into the empty data folder of another machine, or of this one."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from storage_admin.supervisor import backups, checks
from storage_admin.supervisor.errors import SetupError


class Command(BaseCommand):
    help = "Puts the database and keys of a backup into a data folder that has no database; then start as usual."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            checks.require_writable(settings.DATA_DIR)
            manifest = backups.read(options["file"], settings.DATA_DIR)
        except (SetupError, OSError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"Restored what was saved on {manifest['made']} by version {manifest['version']}.")
        if manifest["database"] != "sqlite":
            self.stdout.write("It has keys alone: restore the database with pg_restore, and set DATABASE_URL.")
        for copy in manifest["undo_copies"]:
            self.stdout.write(f"Undo copy on {copy['host']}: {copy['path']} ({copy['bytes']} bytes)")
