"""``manage.py reset_second_factor NAME``: for who lost device and recovery codes, such as the last admin."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from storage_admin.accounts import second_factor
from storage_admin.accounts.models import SYSTEM, User


class Command(BaseCommand):
    help = "Removes a user's authenticator app, passkeys and recovery codes, so that the password alone is enough to "
    "sign in."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username")

    def handle(self, *_args: Any, **options: Any) -> None:
        user = User.objects.filter(username=options["username"]).first()
        if user is None:
            raise CommandError(f"There is no user {options['username']}.")
        kinds = second_factor.reset(SYSTEM, user)
        self.stdout.write(f"{user.username} had: {', '.join(kinds) or 'none'}. All of it is removed.")
