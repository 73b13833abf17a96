"""What runs Storage Admin elsewhere: every path, command and variable that these files name exists.

Where the docker client has compose, that reads the stack as well. The image is not built here, which needs a registry;
what it would hold is put together from the same files, and has to start.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands, load_command_class

from storage_admin.settings import ENVIRONMENT_FILE

ROOT = Path(__file__).resolve().parents[1]
UNITS = sorted((ROOT / "docs/systemd").iterdir())
SERVICES = [path for path in UNITS if path.suffix == ".service"]
DEPLOYMENT = (ROOT / "docs/deployment.md").read_text()
DASHBOARD = ("web", "worker", "scheduler")
#: Our own commands, by the folder of the app that has them.
OURS = {name for name, app in get_commands().items() if not str(app).startswith(("django", "axes", "drf"))}
OURS |= {"migrate"}


def known_variables() -> set[str]:
    """Every variable that the code reads."""
    found: set[str] = set()
    for path in [*ROOT.glob("storage_admin/**/*.py"), *ROOT.glob("images/**/*.py")]:
        text = path.read_text()
        found |= set(re.findall(r"""env(?:iron)?(?:\.\w+)?\(\s*"([A-Z][A-Z_]+)\"""", text))
        found |= set(re.findall(r"""_VARIABLE = "([A-Z_]+)\"""", text))
    return found


KNOWN = known_variables()


def assert_runs(words: list[str]) -> None:
    """The words after ``manage.py`` are a command of ours with options that it has."""
    name, *options = words
    assert name in OURS, f"there is no manage.py {name}"
    command = load_command_class(get_commands()[name], name)
    command.create_parser("manage.py", name).parse_args(options)


def test_the_variables_of_the_code_are_found() -> None:
    assert {
        "DATABASE_URL", "REDIS_URL", "SECRET_KEY", "STORAGE_ADMIN_SECRETS_KEY", "STORAGE_ADMIN_LOCAL",
    } <= KNOWN  # fmt: skip


class TestCompose:
    FILE = ROOT / "docker-compose.yml"
    TEXT = FILE.read_text()
    STACK: dict[str, Any] = yaml.safe_load(TEXT)
    PARTS: dict[str, dict[str, Any]] = STACK["services"]
    WORDS = {
        "image", "build", "init", "restart", "read_only", "tmpfs", "cap_drop", "security_opt", "volumes", "depends_on",
        "environment", "command", "ports", "networks", "healthcheck", "stop_grace_period",
    }  # fmt: skip

    def test_it_has_the_five_parts_and_no_word_that_compose_does_not_know(self, tmp_path: Path) -> None:
        assert set(self.PARTS) == {*DASHBOARD, "postgres", "redis"}
        assert {key for key in self.STACK if not key.startswith("x-")} == {"name", "services", "networks", "volumes"}
        for name, part in self.PARTS.items():
            assert set(part) <= self.WORDS, name
            assert set(part["healthcheck"]) == {"test", "interval", "timeout", "start_period"}, name
        for password, done in _with_compose(self.FILE, tmp_path):
            assert (done.returncode == 0) == password, done.stderr

    @pytest.mark.parametrize(("name", "uses"), [("POSTGRES_PASSWORD", 2), ("REDIS_PASSWORD", 3)])
    def test_it_does_not_start_without_its_passwords(self, name: str, uses: int) -> None:
        assert re.findall(rf"\$\{{{name}(:.)", self.TEXT) == [":?"] * uses

    def test_nobody_gets_into_redis_without_its_password(self) -> None:
        part = self.PARTS["redis"]
        asked = part["command"][part["command"].index("--requirepass") + 1]
        assert asked.startswith("${REDIS_PASSWORD:?")
        assert part["environment"]["REDISCLI_AUTH"] == "${REDIS_PASSWORD:?}"
        assert "redis://:${REDIS_PASSWORD:?}@redis" in self.STACK["x-dashboard"]["environment"]["REDIS_URL"]

    @pytest.mark.parametrize("part", DASHBOARD)
    def test_each_part_of_ours_runs_a_command_that_there_is(self, part: str) -> None:
        assert_runs(self.PARTS[part]["command"])
        cmd, python, script, *check = self.PARTS[part]["healthcheck"]["test"]
        assert (cmd, script) == ("CMD", "manage.py")
        assert python == TestImage.entry_point()[0]
        assert check == ["healthy", part]
        assert_runs(check)

    @pytest.mark.parametrize("part", DASHBOARD)
    def test_every_variable_that_it_sets_is_one_that_the_code_reads(self, part: str) -> None:
        assert set(self.PARTS[part]["environment"]) <= KNOWN
        assert self.PARTS[part]["environment"]["STORAGE_ADMIN_LOCAL"] == "0"

    def test_the_example_has_every_value_that_can_be_set_and_no_other(self) -> None:
        example = (ROOT / ".env.example").read_text()
        names = re.findall(r"^([A-Z_]+)=", example, re.MULTILINE)
        assert sorted(names) == sorted(set(re.findall(r"\$\{([A-Z_]+)", self.TEXT)))
        passwords = {"POSTGRES_PASSWORD", "REDIS_PASSWORD"}
        secret = passwords | {"SECRET_KEY", "STORAGE_ADMIN_SECRETS_KEY", "DATABASE_URL", "REDIS_URL"}
        assert {name for name in names if f"\n{name}=\n" in example} >= secret, "no secret has a value to be left as is"
        assert ".env" in (ROOT / ".gitignore").read_text().split()

    def test_nothing_is_privileged_and_nothing_of_the_machine_is_mounted(self) -> None:
        for name, part in self.PARTS.items():
            assert not {"privileged", "cap_add", "devices", "pid", "network_mode", "user"} & set(part), name
            for volume in part.get("volumes", []):
                assert volume.split(":")[0] in self.STACK["volumes"], f"{name}: {volume}"
        for name in DASHBOARD:
            assert self.PARTS[name]["cap_drop"] == ["ALL"]
            assert self.PARTS[name]["read_only"] is True
        assert [name for name, part in self.PARTS.items() if "ports" in part] == ["web"]
        assert self.PARTS["web"]["ports"] == ["${STORAGE_ADMIN_PORT:-127.0.0.1:8000}:8000"]

    def test_database_and_redis_are_reached_by_the_dashboard_alone_and_keep_what_they_have(self) -> None:
        assert self.STACK["networks"]["back"] == {"internal": True}
        assert self.PARTS["postgres"]["networks"] == self.PARTS["redis"]["networks"] == ["back"]
        redis = self.PARTS["redis"]["command"]
        options = dict(zip(redis[1::2], redis[2::2], strict=True))
        assert redis[0] == "redis-server"
        assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")
        assert {name: self.PARTS[name]["volumes"] for name in ("postgres", "redis", "web")} == {
            "postgres": ["postgres:/var/lib/postgresql/data"],
            "redis": ["redis:/data"],
            "web": ["data:/data"],
        }

    def test_images_have_plain_names(self) -> None:
        for part in self.PARTS.values():
            assert re.fullmatch(r"[a-z-]+(:\d+)?", part["image"]), part["image"]

    def test_the_options_that_redis_gets_are_options_of_redis(self, tmp_path: Path) -> None:
        argv = [*self.PARTS["redis"]["command"], "--port", "0", "--dir", str(tmp_path), "--unixsocket", "x/none/there"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
        assert "Bad directive" not in done.stdout, done.stdout
        assert "Failed opening Unix socket" in done.stdout, "it understood all that came before"

    def test_settings_take_the_values_of_the_stack_as_they_are(self, tmp_path: Path) -> None:
        given = {name: _default(value) for name, value in self.PARTS["web"]["environment"].items()}
        given |= {"STORAGE_ADMIN_DATA_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
        look = (
            "from storage_admin import settings as s; d = s.DATABASES['default']; print(d['HOST'], d['NAME'], "
            "s.REDIS_URL, s.HTTPS, s.ALLOWED_HOSTS, s.CSRF_TRUSTED_ORIGINS, s.LOCAL_MACHINE)"
        )
        done = subprocess.run([sys.executable, "-c", look], env=given, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.split(maxsplit=3)[:3] == ["postgres", "storage_admin", "redis://:@redis:6379/0"], done.stderr
        assert done.stdout.strip().endswith("False ['localhost', '127.0.0.1'] [] False")


def _with_compose(stack: Path, folder: Path) -> Iterator[tuple[bool, subprocess.CompletedProcess[str]]]:
    """What the docker client says of the stack, by whether it has a password; nothing without that client."""
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return
    example = (ROOT / ".env.example").read_text()
    with_one = example.replace("POSTGRES_PASSWORD=", "POSTGRES_PASSWORD=abc", 1)
    for values in ("", example, with_one, with_one.replace("REDIS_PASSWORD=", "REDIS_PASSWORD=abc", 1)):
        (folder / ".env").write_text(values)
        argv = ["docker", "compose", "-f", str(stack), "--env-file", str(folder / ".env"), "config", "--quiet"]
        yield values.count("abc") == 2, subprocess.run(argv, capture_output=True, text=True)


def _default(value: str) -> str:
    """A value of the stack where nothing is set."""
    while match := re.search(r"\$\{[A-Z_]+:(-([^${}]*)|\?[^{}]*)\}", value):
        value = value.replace(match.group(0), match.group(2) or "")
    return value


class TestImage:
    TEXT = (ROOT / "Dockerfile").read_text()
    #: Instruction and its words, lines that go on joined.
    LINES = [
        tuple(line.split(maxsplit=1)) for line in TEXT.replace("\\\n", " ").splitlines() if line and line[0] != "#"
    ]
    LET_IN = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]

    @classmethod
    def entry_point(cls) -> list[str]:
        """The command that every container begins with."""
        return [word for name, words in cls.LINES if name == "ENTRYPOINT" for word in yaml.safe_load(words)]

    def test_each_base_is_an_official_image_and_the_binding_is_built_and_run_on_the_same(self) -> None:
        bases = [words.split()[0] for name, words in self.LINES if name == "FROM"]
        assert all(re.fullmatch(r"[a-z]+:[\w.-]+", base) for base in bases), bases
        assert bases[-1] == bases[-2]
        wanted = re.search(r"python:(\d+\.\d+)", bases[-1])
        assert wanted is not None
        lock = (ROOT / "CONTRIBUTING.md").read_text()
        assert f"--python-version {wanted.group(1)}" in lock, "the lock is made for that Python"

    def test_it_installs_what_the_lock_says_by_hash(self) -> None:
        assert "pip install --no-cache-dir --require-hashes --requirement /build/run.lock" in self.TEXT
        assert "COPY requirements/run.lock /build/run.lock" in self.TEXT
        assert "--hash=sha256:" in (ROOT / "requirements/run.lock").read_text()
        assert "RUN npm ci --ignore-scripts" in self.TEXT

    def test_its_user_is_not_root_and_owns_the_data_alone(self) -> None:
        users = [words for name, words in self.LINES if name == "USER"]
        assert users == ["10001:10001"]
        assert self.LINES.index(("USER", users[0])) > max(
            index for index, (name, _words) in enumerate(self.LINES) if name == "RUN"
        )
        assert "-m 0700 /data" in self.TEXT

    def test_what_it_runs_and_sets_is_there(self) -> None:
        python, script = self.entry_point()
        assert python.startswith("/opt/venv/bin/")
        assert f"python -m venv {Path(python).parents[1]}" in self.TEXT
        assert (ROOT / script).is_file()
        assert_runs(next(yaml.safe_load(words) for name, words in self.LINES if name == "CMD"))
        (environment,) = (words for name, words in self.LINES if name == "ENV")
        assert {pair.split("=")[0] for pair in environment.split()} <= KNOWN | {"PYTHONUNBUFFERED"}

    def test_secrets_and_data_stay_out_of_it(self) -> None:
        assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
        for name in (".env", ".git", "var", "tests", ".venv", "node_modules"):
            assert not any(entry == name or entry.startswith(name + "/") for entry in self.LET_IN)
        assert all((ROOT / entry).exists() for entry in self.LET_IN)

    @pytest.mark.services
    def test_what_it_holds_is_enough_to_start(self, tmp_path: Path) -> None:
        app = tmp_path / "app"
        for source, target in self._copied():
            (app / target).parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, app / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, app / target)
        environment = {"PATH": os.environ["PATH"], "STORAGE_ADMIN_DATA_DIR": str(tmp_path / "data")}
        for words in (
            ["migrate", "-v", "0"],
            ["collectstatic", "--no-input"],
            ["create_token", "t", "--role", "admin"],
        ):
            argv = [sys.executable, "manage.py", *words]
            done = subprocess.run(argv, env=environment, cwd=app, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        collected = set(json.loads((tmp_path / "data/static/staticfiles.json").read_text())["paths"])
        pages = "".join(path.read_text() for path in (ROOT / "templates").rglob("*.html"))
        assert set(re.findall(r"{% static '([^']+)' %}", pages)) <= collected
        assert len(collected) < 40  # what no page loads is not compressed at every first start

    def _copied(self) -> Iterator[tuple[Path, str]]:
        """What lies where in /app: what the context lets in, and what the browser needs."""
        for name, words in self.LINES:
            if name == "COPY" and words.startswith("--from=browser"):
                _stage, source, target = words.split()
                yield ROOT / source.removeprefix("/build/"), target
        assert ("COPY", ". .") in self.LINES
        yield from ((ROOT / entry, entry) for entry in self.LET_IN)


class TestUnits:
    @pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
    def test_every_unit_that_it_names_is_one_of_ours_or_of_the_system(self, path: Path) -> None:
        named = re.findall(r"storage-admin[\w-]*@?\.(?:service|target)", path.read_text())
        ours = {unit.name for unit in UNITS}
        assert {name for name in named if name not in ours} == set()

    @pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
    def test_what_it_starts_is_a_command_that_there_is(self, path: Path) -> None:
        unit = _unit(path)
        program, *words = unit["ExecStart"][0].replace("%i", "some-slug").split()
        assert program == "/usr/bin/storage-admin"
        assert_runs(words)
        assert {pair.split("=")[0] for pair in unit["Environment"]} <= KNOWN
        assert unit["EnvironmentFile"][0].removeprefix("-") == str(ENVIRONMENT_FILE)
        assert f"`{ENVIRONMENT_FILE}`" in DEPLOYMENT
        assert unit["Documentation"][0] == "file:/usr/share/doc/storage-admin/deployment.md"

    def test_who_works_on_images_is_root_and_sees_the_machine_as_it_is(self) -> None:
        for name in ("storage-admin-worker@.service", "storage-admin-up.service"):
            unit = _unit(ROOT / "docs/systemd" / name)
            assert "User" not in unit
            hidden = {
                "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectProc", "ReadOnlyPaths",
                "ProtectKernelModules", "ProtectKernelTunables", "ProtectControlGroups", "ProtectClock",
                "PrivateMounts", "SystemCallFilter", "RestrictNamespaces", "RestrictSUIDSGID", "DevicePolicy",
            }  # fmt: skip
            assert not hidden & set(unit)
            assert (unit["KillMode"], unit["OOMPolicy"]) == (["mixed"], ["continue"])

    def test_the_other_parts_are_no_root_and_have_nothing(self) -> None:
        for part in DASHBOARD:
            unit = _unit(ROOT / f"docs/systemd/storage-admin-{part}.service")
            assert (unit["User"], unit["CapabilityBoundingSet"]) == (["storage-admin"], [""])
            assert (unit["ProtectSystem"], unit["NoNewPrivileges"]) == (["strict"], ["yes"])
            assert f"storage-admin-{part}.service" in _unit(ROOT / "docs/systemd/storage-admin.target")["Wants"][0]
        assert "STORAGE_ADMIN_LOCAL=0" in _unit(ROOT / "docs/systemd/storage-admin-worker.service")["Environment"]

    def test_systemd_understands_them(self, tmp_path: Path) -> None:
        installed = []
        for path in UNITS:
            text = path.read_text().replace("file:/usr/share/doc/storage-admin", f"file:{ROOT}/docs")
            (tmp_path / path.name).write_text(text.replace("/usr/bin/storage-admin", sys.executable))
            installed.append(path.name.replace("@.", "@some-slug."))
        shutil.copy(tmp_path / "storage-admin-worker@.service", tmp_path / "storage-admin-worker@some-slug.service")
        argv = ["systemd-analyze", "verify", *(str(tmp_path / name) for name in installed)]
        done = subprocess.run(argv, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "storage-admin" in line]
        assert (done.returncode, said) == (0, [])


class TestPackage:
    """What is wrong with it without building it; tests/supervisor/test_deb.py builds, installs and removes it."""

    FOLDER = ROOT / "setup/debian"
    SCRIPTS = ("postinst", "prerm", "postrm")

    def test_all_that_it_puts_in_is_there(self) -> None:
        names = {path.name for path in self.FOLDER.iterdir()}
        assert names == {*self.SCRIPTS, "environment", "copyright"}
        text = (ROOT / "setup/deb").read_text()
        assert all(name in text for name in names)

    @pytest.mark.parametrize("name", SCRIPTS)
    def test_its_scripts_end_at_the_first_failure_and_name_units_that_there_are(self, name: str) -> None:
        script = self.FOLDER / name
        assert re.search(r"^set -e$", script.read_text(), re.MULTILINE)
        assert subprocess.run(["sh", "-n", script]).returncode == 0
        named = set(re.findall(r"storage-admin[\w-]*\.(?:service|target)", script.read_text()))
        assert named <= {path.name for path in UNITS}

    def test_every_variable_of_its_file_is_one_that_the_code_reads_and_none_is_set(self) -> None:
        lines = (self.FOLDER / "environment").read_text().splitlines()
        names = {match[1] for line in lines if (match := re.fullmatch(r"#([A-Z_]+)=.*", line))}
        assert len(names) > 8
        assert names <= KNOWN
        assert [line for line in lines if line and line[0] != "#"] == []


def _unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit, each with its values in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


class TestTheGuide:
    def test_every_command_in_it_is_there(self) -> None:
        commands = re.findall(r"manage\.py ([a-z_]+(?: FILE)?(?: --[a-z-]+(?: SLUG| local)?)*)", DEPLOYMENT)
        assert len(commands) > 8
        for words in commands:
            assert_runs(words.split())

    def test_every_file_of_the_project_in_it_is_there(self) -> None:
        paths = re.findall(r"\b(?:docs|setup)/[\w/@.*-]+", DEPLOYMENT)
        paths += ["docker-compose.yml", ".env.example"]
        assert len(paths) > 8
        for path in paths:
            assert list(ROOT.glob(path.rstrip("."))), path

    def test_every_variable_in_it_is_one_that_the_code_reads(self) -> None:
        named = set(re.findall(r"\b(?:STORAGE_ADMIN_[A-Z_]+|[A-Z]+_(?:URL|KEY|HOSTS|ORIGINS))\b", DEPLOYMENT))
        assert named <= KNOWN
        assert {"DATABASE_URL", "REDIS_URL", "SECRET_KEY", "STORAGE_ADMIN_SECRETS_KEY", "ALLOWED_HOSTS"} <= named

    def test_the_key_that_it_makes_is_one_for_secrets(self) -> None:
        (line,) = set(re.findall(r"`(head -c 32 [^`]+)`", DEPLOYMENT))
        assert line in (ROOT / ".env.example").read_text()
        key = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
        lock = "import sys; from storage_admin.hosts import secrets as s; print(s.unlock(s.lock('opened')))"
        environment = {"PATH": os.environ["PATH"], "STORAGE_ADMIN_SECRETS_KEY": key.strip()}
        done = subprocess.run(
            [sys.executable, "-c", f"import storage_admin.celery, django; django.setup(); {lock}"],
            env=environment, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.strip() == "opened", done.stderr
