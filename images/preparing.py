"""What has to be there before a web server starts: files for the browser, tables, the first admin."""

import contextlib
from collections.abc import Callable

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connections

from storage_admin.accounts.services import ensure_first_admin
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts import folders, transport
from storage_admin.hosts.services import ensure_local_host
from storage_admin.supervisor import database
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.static_files import collect_if_changed


def prepare(say: Callable[[str], None], *, local: bool) -> str:
    """Makes what is missing; of several that start at once, one does, and the others wait for it.

    Args:
        say: is told what an admin should know.
        local: this machine is the host ``local``.

    Returns:
        A sentence with the first admin's password, where it was made just now: nothing else ever tells it.

    Raises:
        SetupError: the database cannot be used, or the set-up is not complete.
    """
    database.refuse_emptied(settings.DATA_DIR)
    try:
        with database.alone(settings.DATA_DIR):
            collect_if_changed(settings.DATA_DIR / "static.stamp")
            database.refuse_older()
            call_command("migrate", interactive=False, verbosity=0)
            if local:
                _register_this_machine(say)
            password = ensure_first_admin()
    except DatabaseError as error:
        said = " ".join(str(error).split())
        raise SetupError(f"The database of DATABASE_URL cannot be used: {said}") from error
    connections.close_all()
    if password is None:
        return ""
    return (
        f"First start. Log in as admin with the password {password} (shown only this once; it must be changed at "
        "the first login)."
    )


def _register_this_machine(say: Callable[[str], None]) -> None:
    host = ensure_local_host()
    if not transport.is_this_machine(host):
        say(
            f"The host local in this database is another machine ({host.name}), so images on this machine are not "
            "listed. Add this machine as a host of its own, then start here: manage.py worker --host SLUG"
        )
        return
    with contextlib.suppress(RefusedError):  # nobody here can be root, and so nobody works on images either
        folders.exclude_own(host)
