"""The wheel: installed by itself, far from a checkout, it runs with its pages, its files and its agent."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import requests

import storage_admin
from tests.harness.processes import Daemon, free_port

pytestmark = [pytest.mark.services, pytest.mark.night]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, beside the libraries of the tests' own one, which are not fetched again."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, ROOT / "setup/wheel", folder], check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"storage_admin-{storage_admin.__version__}-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([python, *pip, wheel], check=True)
    own = said(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(own) / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv/bin/storage-admin"


def environment(**more: str) -> dict[str, str]:
    kept = ("PATH", "LANG", "HOME")
    return {name: os.environ[name] for name in kept if name in os.environ} | more


def said(*command: str | Path, **more: str) -> str:
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=True, cwd="/").stdout


def test_it_says_its_version(installed: Path) -> None:
    assert said(installed, "--version") == f"{storage_admin.__version__}\n"


def test_it_keeps_its_data_where_services_do(installed: Path, tmp_path: Path) -> None:
    ask = "from django.conf import settings; print(settings.DATA_DIR)"
    where = said(installed, "shell", "--no-imports", "-c", ask, XDG_DATA_HOME=str(tmp_path), SECRET_KEY="x").strip()
    assert where == ("/var/lib/storage-admin" if os.geteuid() == 0 else f"{tmp_path}/storage-admin")


def test_it_runs_with_its_pages_and_files_and_scans_this_machine_by_its_own_agent(
    installed: Path, tmp_path: Path
) -> None:
    bind = f"127.0.0.1:{free_port()}"
    own = {"STORAGE_ADMIN_DATA_DIR": str(tmp_path / "data"), "STORAGE_ADMIN_BIND": bind, "STORAGE_ADMIN_LOCAL": "0"}
    with Daemon([str(installed), "up"], tmp_path / "log", env=environment(**own), cwd=Path("/"), grace=60) as up:
        up.wait_for(lambda: "password" in up.said(), 120, "it is up and says the first password")
        page = requests.get(f"http://{bind}/login/", timeout=30)
        assert page.status_code == 200
        files = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text))
        assert {Path(name).suffix for name in files} >= {".css", ".js"}
        for name in files:
            assert requests.get(f"http://{bind}{name}", timeout=30).status_code == 200, name
        assert requests.get(f"http://{bind}/healthz", timeout=30).json()["worker"] is True
    installer = said(installed, "agent_installer", "--user", "nobody", **own)
    assert re.search(r"agent-[0-9a-f]{32}\.pyz", installer)
