"""``manage.py agent_installer``: prints a script that installs the agent behind a forced command."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from storage_admin.errors import InvalidError
from storage_admin.hosts import addresses, forced


class Command(BaseCommand):
    help = (
        "Prints a shell script to run as root on a hypervisor. It installs the agent and allows an SSH key to "
        "run only the agent: manage.py agent_installer --key ID.pub | ssh root@HOST sh"
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--key", help="public key that may run the agent, or its file; without it, no key is added")
        parser.add_argument(
            "--folder",
            action="append",
            default=[],
            help="a folder of images on the hypervisor, added to the agent's list (may be repeated)",
        )
        parser.add_argument(
            "--user", default="root", help="user whose authorized_keys file gets the key (default: root)"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            user = addresses.user(options["user"])
            given = options["key"] or ""
            is_key = given.startswith(("ssh-", "ecdsa-"))
            key = addresses.host_key(given if is_key else Path(given).read_text().strip()) if given else ""
        except InvalidError as error:
            raise CommandError(error.detail) from error
        except OSError as error:
            raise CommandError(f"{options['key']}: {error.strerror}") from error
        for folder in options["folder"]:
            if not folder.startswith("/") or not folder.isprintable():
                raise CommandError(f"{folder!a} is not an absolute path.")
        sys.stdout.write(forced.installer(user, key, options["folder"]))
