"""``manage.py worker``: one more worker, beside those that are there, or one for the hypervisor that it runs on."""

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import ensure_local_host
from storage_admin.supervisor import checks, commands, database
from storage_admin.supervisor.errors import SetupError


class Command(BaseCommand):
    """Waits for the tables, looks whether this is the right machine, then becomes the worker."""

    help = (
        "Runs a worker in the foreground, for your own database and Redis. `up` already includes a worker. With "
        "--host, it only runs jobs of the host that it is on."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        default = commands.WORKER_THREADS
        parser.add_argument("--threads", type=int, default=default, help=f"jobs at once (default: {default})")
        parser.add_argument(
            "--host", default=settings.WORKER_HOST, metavar="SLUG", help="slug of the host that this machine is"
        )
        parser.add_argument(
            "--new-machine",
            action="store_true",
            help="this machine replaces the one that the host was so far",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            checks.require_writable(settings.DATA_DIR)
            if slug := options["host"]:
                checks.require_tools(checks.TOOLS)
                transport.local_command()
            database.wait_for_tables(lambda text: print(text, flush=True))
            if slug:
                take_place(slug, new_machine=options["new_machine"])
        except SetupError as error:
            self.stderr.write(str(error))
            sys.exit(1)
        except (RefusedError, HostError) as error:
            raise CommandError(error.detail) from error
        worker = commands.worker(options["threads"], "info")
        commands.become(worker, settings.BASE_DIR, STORAGE_ADMIN_WORKER_HOST=slug)


def take_place(slug: str, *, new_machine: bool) -> None:
    """Makes sure that this machine is the host of that name.

    Args:
        new_machine: it is from now on.

    Raises:
        CommandError: there is no such host, or it is another machine.
    """
    host = Host.objects.filter(slug=slug).first()
    if host is None and slug == "local":
        host = ensure_local_host()
    if host is None:
        known = ", ".join(Host.objects.values_list("slug", flat=True)) or "none"
        raise CommandError(f"There is no host {slug}. Known hosts: {known}. Add the host in the dashboard first.")
    if new_machine:
        transport.set_machine(host)
    if not transport.is_this_machine(host):
        raise CommandError(
            f"{slug} is another machine than this one: it was "
            f"{host.capabilities.get('hostname') or 'seen elsewhere'}, {transport.machine_of(host)}, and this one "
            f"is {transport.this_machine()}. If this machine replaces it, add --new-machine."
        )
