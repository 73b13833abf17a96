"""A list as CSV, taken whole in a process of its own, as memory that others have used would hide what it takes.

``python -m tests.performance.one_file``, with the settings of the benchmark in its environment.
"""

import json
import sys
import time
from pathlib import Path

import django

ADDRESS = "/images/export.csv?ordering=-allocated_size"
#: What a web process was asked for before: its code is loaded, and SQLite has the pages in memory that it keeps.
BEFORE = ("/images/?ordering=-allocated_size", "/images/export.csv?search=web-000001")


def main() -> int:
    """Writes the file's bytes and lines, the seconds it took and by how many bytes the process grew, as JSON."""
    django.setup()
    from django.test import Client  # noqa: PLC0415 (only now that Django is set up)

    from storage_admin.accounts.models import User  # noqa: PLC0415

    client = Client()
    client.force_login(User.objects.get(username="bench"), backend="django.contrib.auth.backends.ModelBackend")
    for address in BEFORE:
        b"".join(client.get(address))
    before, begin, size, lines = resident(), time.perf_counter(), 0, 0
    for part in client.get(ADDRESS):
        size += len(part)
        lines += part.count(b"\r\n")
    taken = time.perf_counter() - begin
    json.dump({"taken": taken, "size": size, "lines": lines, "grown": resident() - before}, sys.stdout)
    return 0


def resident() -> int:
    """Bytes that this program has had resident at most; what getrusage tells begins with its starter's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
