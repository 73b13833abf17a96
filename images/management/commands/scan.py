"""``manage.py scan``: scans a host and waits for the end."""

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import Host
from storage_admin.jobs import routing, runner, services
from storage_admin.jobs.models import Job


class Command(BaseCommand):
    help = "Reads which images and guests a host has now, and waits for the end."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("host", nargs="?", default="local", help="the host's slug (default: local, this machine)")

    def handle(self, *_args: Any, **options: Any) -> None:
        host = Host.objects.filter(slug=options["host"]).first()
        if host is None:
            known = ", ".join(Host.objects.values_list("slug", flat=True)) or "none; start `manage.py up` once"
            raise CommandError(f"There is no host {options['host']}. Known hosts: {known}.")
        served = routing.is_served(host)
        if not served and not routing.serves(host):
            raise CommandError(
                f"No running worker can scan {host.name}. Start one on the host itself: manage.py worker "
                f"--host {host.slug}."
            )
        job = services.submit(SYSTEM, "scan", host.pk, {})
        while job.active:
            if not served:
                runner.run(job.pk)  # nobody else would, also where it had to wait
            time.sleep(0.2)
            job.refresh_from_db()
        if job.state != Job.State.SUCCEEDED:
            raise CommandError(f"The scan has {job.state}: {job.error_detail}")
        result = job.result or {}
        print(
            f"{host.name}: {result['images']} images, {result['read']} of them new or changed, "
            f"{result['vanished']} vanished."
        )
