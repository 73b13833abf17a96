"""``manage.py demo``: about twenty small real images, so that every page has something true to show."""

import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from images.demo import make
from images.demo import pool as demo_pool
from images.demo.recipes import DemoError
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.supervisor.commands import typed


def default_folder() -> Path:
    """A folder of images alone: not the dashboard's own, which are never worked on."""
    return (Path("/srv") if os.geteuid() == 0 else Path.home()) / "storage-admin-demo"


class Command(BaseCommand):
    help = "Creates small real disk images in a separate folder and registers that folder as a storage pool."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--path", type=Path, help=f"where to make them (default: {default_folder()})")
        parser.add_argument("--remove", action="store_true", help="remove the images and their pool")

    def handle(self, *_args: Any, **options: Any) -> None:
        folder = Path(options["path"] or default_folder()).absolute()
        earlier = settings.DATA_DIR / "demo"  # where images are not worked on any more
        if options["remove"] and not options["path"] and make.is_demo(earlier):
            folder = earlier.absolute()
        try:
            if options["remove"]:
                self._remove(folder)
            else:
                self._make(folder)
        except (DemoError, InvalidError, RefusedError) as error:
            raise CommandError(getattr(error, "detail", "") or str(error)) from error

    def _make(self, folder: Path) -> None:
        made = make.make(folder)
        print(f"{folder}: {len(made.made)} files made, {len(made.kept)} were there.")
        if made.foreign:
            print(f"Left alone, because the demo did not make them: {', '.join(made.foreign)}.")
        refused = demo_pool.allow(folder)
        if refused:
            print(refused)
        pool = demo_pool.register(SYSTEM, folder)
        job = demo_pool.scan_if_a_worker_is_up(SYSTEM, pool)
        if job:
            print(f"They are being scanned by job {job.pk}: look at the page Images in a moment.")
        else:
            start = typed(settings.START, settings.DATA_DIR, settings.USUAL_DATA_DIR)
            print(f"They are scanned as soon as Storage Admin runs: {start}")

    def _remove(self, folder: Path) -> None:
        if not make.is_demo(folder):
            raise CommandError(f"The demo did not create {folder}, so nothing is removed.")
        demo_pool.forget(SYSTEM, folder)
        removed = make.remove(folder)
        print(f"{folder}: {removed.count} files taken away.")
        if removed.foreign:
            print(f"Left, because the demo did not make them: {', '.join(removed.foreign)}.")
