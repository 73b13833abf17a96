"""Django's own advice for deployment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_djangos_check_for_deployment_has_nothing_to_say(tmp_path: Path) -> None:
    environment = os.environ | {"HTTPS": "1", "STORAGE_ADMIN_DATA_DIR": str(tmp_path), "DEBUG": "0"}
    environment["DJANGO_SETTINGS_MODULE"] = "storage_admin.settings"
    command = [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
