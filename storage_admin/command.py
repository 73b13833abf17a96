"""Storage Admin's command line: ``manage.py`` in a checkout, ``storage-admin`` where it is installed."""

import errno
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line

import storage_admin.celery


def main() -> None:
    """Runs the command that the arguments name; what cannot start ends with a sentence."""
    if sys.argv[1:] in (["--version"], ["version"]):
        print(storage_admin.__version__)  # noqa: T201 (what was asked for)
        return
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(str(error))
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        sys.exit(f"The disk is full ({error.filename or 'of the data folder'}). Free some space there and start again.")
