"""Runs a supervisor over children that a test describes as JSON: signals need a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from storage_admin.supervisor.child import Backoff, ChildSpec
from storage_admin.supervisor.errors import SetupError
from storage_admin.supervisor.supervisor import Supervisor


def _spec(given: dict[str, Any]) -> ChildSpec:
    wait_for = given.pop("ready_file", None)
    ready = Path(wait_for).exists if wait_for else None
    return ChildSpec(argv=("sh", "-c", given.pop("script")), cwd=Path.cwd(), ready=ready, **given)


def main() -> int:
    plan = json.loads(sys.argv[1])
    supervisor = Supervisor([_spec(child) for child in plan["children"]], sys.stdout, Backoff(**plan["backoff"]))
    looks = iter(range(2))

    def watch() -> bool:
        supervisor.say("looked")
        return next(looks, None) is not None

    try:
        supervisor.run(lambda: supervisor.say("all ready"), watch)
    except SetupError as error:
        print(error)
        return 1
    supervisor.say("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
