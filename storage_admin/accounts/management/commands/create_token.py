"""``manage.py create_token NAME --role viewer|operator|admin``: prints the token, and nothing else."""

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from storage_admin.accounts.models import SYSTEM, Role
from storage_admin.accounts.services import create_token
from storage_admin.errors import InvalidError


class Command(BaseCommand):
    help = "Creates an API token and prints it. The token is not stored and cannot be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="name of the token, shown in the audit trail")
        parser.add_argument("--role", choices=[role.label for role in Role], default=Role.VIEWER.label)
        parser.add_argument("--hosts", nargs="+", default=[], metavar="SLUG", help="limit the token to these hosts")
        parser.add_argument("--expires-days", type=int, metavar="DAYS", help="number of days until the token expires")

    def handle(self, *_args: Any, **options: Any) -> None:
        days = options["expires_days"]
        try:
            expires = None if days is None else timezone.now() + timedelta(days=days)
            role = Role.named(options["role"])
            _, secret = create_token(SYSTEM, options["name"], role, hosts=options["hosts"], expires=expires)
        except OverflowError:
            raise CommandError(f"{days} days from now is not a valid date. Choose a smaller number.") from None
        except (ValueError, InvalidError) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(secret)
