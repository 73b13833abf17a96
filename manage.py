#!/usr/bin/env python
"""Storage Admin's command line; ``manage.py up`` starts everything."""

import errno
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line

import storage_admin.celery  # noqa: F401 (names the settings, and the app that tasks are sent by)

if __name__ == "__main__":
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(str(error))
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        sys.exit(f"The disk is full ({error.filename or 'of the data folder'}). Free some space there and start again.")
