"""How the agent is started on a host: here as root, else by ``sudo -n``; on others by ssh, where it is installed first.

On other hosts it lies in :data:`FOLDER`, which belongs to root, as one file per content hash. Whether that is there is
looked at once per process and host, and anew where it turns out to be gone. With a forced command the host itself
decides what runs: an admin installs it there by a printed command.

And which machine is *here*, and so the host ``local`` of all that share its database: the one on which ``manage.py up``
runs. Its row says which that is, by the machine's id (machine-id(5)) or, where there is none, by its name; each scan
says it again. A process on another machine leaves ``local`` alone.
"""

import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.utils.translation import gettext as _

from storage_admin.agent import bundle, protocol
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import secrets, ssh
from storage_admin.hosts.models import Host
from storage_admin.hosts.session import AgentMissingError, UngreetedError
from storage_admin.hosts.shells import LocalShell, Shell


def machine_facts() -> dict[str, Any]:
    """What a host's capabilities say of the machine itself, as a scan writes it."""
    return {"hostname": socket.gethostname(), "machine_id": protocol.machine_id()}


def this_machine() -> str:
    """The identity of this machine."""
    return _identity(machine_facts())


def machine_of(host: Host) -> str:
    """The identity of a host's machine; empty where nobody has looked at it yet."""
    return _identity(host.capabilities)


def _identity(facts: dict[str, Any]) -> str:
    return str(facts.get("machine_id") or facts.get("hostname") or "")


def is_this_machine(host: Host) -> bool:
    """Whether a host's row is about this machine, as far as anybody knows."""
    return machine_of(host) in {"", this_machine()}


def take_local(host: Host) -> bool:
    """Writes into the row of ``local`` that it is this machine.

    Returns:
        ``False`` where it is another one: then nothing is written. A database in a file is where its machine is: a data
        folder that was moved takes ``local`` along.
    """
    if machine_of(host) == this_machine():
        return True
    if machine_of(host) and connection.vendor != "sqlite":
        return False
    set_machine(host)
    return True


def set_machine(host: Host) -> None:
    """Writes into a host's row that it is this machine, whatever it was."""
    host.capabilities = host.capabilities | machine_facts()
    host.save(update_fields=["capabilities"])


#: A laboratory has it elsewhere.
FOLDER = os.environ.get("STORAGE_ADMIN_AGENT_FOLDER") or "/usr/local/lib/storage-admin"
PYTHON = "python3"
#: Seconds for sudo to say whether it lets somebody.
SUDO_TIMEOUT = 30.0
#: What a line that was sent exits with where the agent is not installed, there is no Python 3, or no right to be root.
NOT_INSTALLED, NO_PYTHON, NO_ROOT = 97, 98, 99
#: Puts the agent from standard input into its folder, if it arrived whole: $1 folder, $2 file, $3 its SHA-256's begin.
INSTALL = """set -eu
umask 022
mkdir -p -- "$1"
test "$(stat -c %u -- "$1")" = 0 || { echo "$1 does not belong to root" >&2; exit 1; }
chmod go-w -- "$1"
new="$1/.new.$$"
trap 'rm -f -- "$new"' EXIT
cat > "$new"
case "$(sha256sum < "$new")" in "$3"*) ;; *) echo "the agent did not arrive whole" >&2; exit 1 ;; esac
sync "$new" 2>/dev/null || sync
mv -f -- "$new" "$2"
"""

_BY_SSH = {Host.Transport.SSH, Host.Transport.FORCED, Host.Transport.PLAIN, Host.Transport.API_SSH}
_installed: set[tuple[str, int, str]] = set()
_installing: dict[tuple[str, int, str], threading.Lock] = {}
_lock = threading.Lock()


@lru_cache(maxsize=1)
def agent_bundle() -> bundle.Bundle:
    """The agent as one file, built once per process into the data folder."""
    return bundle.build(Path(settings.DATA_DIR) / "agent")


def is_here(host: Host) -> bool:
    """Whether this process runs on the host itself: as a worker that was started for it, or on the machine `local`."""
    if settings.WORKER_HOST:
        return bool(host.slug == settings.WORKER_HOST)
    return host.kind == Host.Kind.LOCAL and settings.LOCAL_MACHINE and is_this_machine(host)


def by_ssh(host: Host) -> bool:
    """Whether a host is reached by ssh from here."""
    return not is_here(host) and host.transport in _BY_SSH


def by_libvirt_alone(host: Host) -> bool:
    """Whether libvirt is the only way to a host."""
    return host.kind == Host.Kind.LIBVIRT and not is_here(host)


def endpoint(host: Host) -> ssh.Endpoint:
    """Where and how a host is reached by ssh.

    Raises:
        HostError: its key cannot be read.
    """
    key = secrets.unlock(host.private_key_locked)
    port = host.ssh_port if host.kind == Host.Kind.PROXMOX else host.port
    return ssh.Endpoint(host.address, port or 22, host.user, host.host_key, key)


def shell(host: Host) -> Shell:
    """Plain commands on a host, as root.

    Raises:
        RefusedError: ``host_unreachable``, where there is no way to run any.
    """
    if is_here(host):
        return LocalShell()
    if not by_ssh(host) or host.transport == Host.Transport.FORCED:
        raise RefusedError("host_unreachable", _("No commands can be run on {host} over SSH.").format(host=host.name))
    return ssh.SshShell(endpoint(host))


@contextlib.contextmanager
def agent_command(host: Host, word: str = "") -> Iterator[list[str]]:
    """The argument list that starts the agent on ``host``, valid as long as the context lasts.

    Args:
        word: the one that the agent is started with, where it has to be.

    Raises:
        RefusedError: ``host_unreachable``, with the command that mends it, or where nobody can say the word.
        HostError: it cannot be reached, or the agent cannot be installed there.
        AgentMissingError: it was installed, and is there no more; the next call installs it.
    """
    if is_here(host):
        yield [*local_command(), *([word] if word else [])]
        return
    if not by_ssh(host):
        raise RefusedError("host_unreachable", no_way_to(host))
    if host.transport == Host.Transport.PLAIN:
        raise RefusedError(
            "host_unreachable",
            _("{host} has no Python 3, so the agent cannot run there.").format(host=host.name),
        )
    where, line = endpoint(host), None
    if host.transport != Host.Transport.FORCED:
        ensure_installed(where)
        line = start_line(where, word)
    elif word:
        sentence = _("The SSH key of {host} can only run the agent.")
        raise RefusedError("host_unreachable", sentence.format(host=host.name))
    with _unreachable_where_it_is(where), ssh.connection(where, line) as command:
        yield command


@contextlib.contextmanager
def _unreachable_where_it_is(where: ssh.Endpoint) -> Iterator[None]:
    """An agent that did not even greet is told as what it is: a host that is gone, or hangs."""
    try:
        yield
    except UngreetedError as error:
        if error.exit_code in (NOT_INSTALLED, NO_PYTHON):  # somebody has removed it since
            forget_installed(where)
        if error.exit_code == NO_PYTHON:
            raise HostError(no_python(where), "tool_missing") from error
        if error.exit_code == NOT_INSTALLED:
            raise AgentMissingError(error.detail, error.code) from error
        if error.exit_code == ssh.CONNECTION_FAILED:
            raise HostError(ssh.why_not(where, error.said), "host_unreachable") from error
        if error.exit_code is None:
            sentence = _("{address}: connected, but the agent did not start. {detail}")
            raise HostError(sentence.format(address=where.address, detail=error.detail), "host_unreachable") from error
        raise


def no_python(where: ssh.Endpoint) -> str:
    """Why no agent can run there, in a sentence."""
    return _("python3 is not installed on {address}. Install it there.").format(address=where.address)


def no_way_to(host: Host) -> str:
    """Why neither the agent nor a plain command reaches a host from here, in a sentence."""
    if host.kind == Host.Kind.LOCAL:
        return _("{host} is the machine that runs `manage.py up`. Only a worker on that machine can reach it.").format(
            host=host.name
        )
    return _("{host} is connected by its API only, so no agent can run there.").format(host=host.name)


def local_command() -> list[str]:
    """The argument list that starts the agent on this machine.

    Raises:
        RefusedError: ``host_unreachable``, with the command that gives root's rights.
    """
    # Without site (-S): the agent needs nothing that is installed, and does not wait for it to be looked through.
    command = [sys.executable, "-IS", str(agent_bundle().path)]
    if os.geteuid() == 0:
        return command
    sudo = shutil.which("sudo")
    installed = [PYTHON, "-I", remote_file()]  # as the installer puts it there, with a rule for it alone
    if sudo is not None and Path(remote_file()).is_file() and _allows(sudo, "-l", *installed):
        return [sudo, "-n", *installed]
    if sudo is None or not _allows(sudo, "true"):
        raise RefusedError(
            "host_unreachable",
            _(
                "Images on this machine belong to root, and the dashboard cannot become root. Run here: "
                "manage.py agent_installer --user {user} | sudo sh"
            ).format(user=getpass.getuser()),
        )
    return [sudo, "-n", *command]


def _allows(sudo: str, *asked: str) -> bool:
    process = subprocess.Popen(
        [sudo, "-n", *asked], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait(SUDO_TIMEOUT) == 0
    except subprocess.TimeoutExpired:  # as of a directory of users that is away; it is root's, so nobody can end it
        threading.Thread(target=process.wait, daemon=True).start()
        sentence = _("sudo did not answer within {seconds:.0f} s.").format(seconds=SUDO_TIMEOUT)
        raise HostError(sentence, "host_unreachable") from None


def remote_file() -> str:
    """Where the agent of this version lies on other hosts."""
    return f"{FOLDER}/agent-{agent_bundle().hash}.pyz"


def start_line(where: ssh.Endpoint, word: str = "") -> str:
    """What the user's shell there runs: the agent as root, or exit code :data:`NOT_INSTALLED` or :data:`NO_PYTHON`."""
    words = [PYTHON, "-I", remote_file(), *([word] if word else [])]
    file = shlex.quote(remote_file())
    python = f"command -v {PYTHON} >/dev/null || exit {NO_PYTHON}"
    script = f"test -r {file} || exit {NOT_INSTALLED}; {python}; exec {ssh.as_root(where, words)}"
    return shlex.join(["sh", "-c", script])


def ensure_installed(where: ssh.Endpoint) -> None:
    """Sees to it that the agent lies on a host.

    Raises:
        HostError: it cannot be reached, there is no Python 3, or root's rights are not to be had; says what to do.
    """
    key = (where.address, where.port, agent_bundle().hash)
    with _lock:
        turn = _installing.setdefault(key, threading.Lock())
    with turn:
        if key not in _installed:
            install(where)
            _installed.add(key)


def forget_installed(where: ssh.Endpoint) -> None:
    """The agent was not where it should be: the next start looks anew."""
    _installed.discard((where.address, where.port, agent_bundle().hash))


def install(where: ssh.Endpoint) -> None:
    """Puts the agent onto a host, unless it is there.

    Raises:
        HostError: as :func:`ensure_installed`.
    """
    remote, file = ssh.SshShell(where), shlex.quote(remote_file())
    look = (
        f"test -r {file} && exit 0; command -v {PYTHON} >/dev/null || exit {NO_PYTHON}; "
        f"{ssh.as_root(where, ['true'])} || exit {NO_ROOT}; exit {NOT_INSTALLED}"
    )
    found = remote.run_text(shlex.join(["sh", "-c", look]))
    if found.exit_code == 0:
        return
    if found.exit_code == NO_PYTHON:
        raise HostError(no_python(where), "tool_missing")
    if found.exit_code == NO_ROOT:
        raise HostError(
            _(
                "{user} cannot become root on {address} ({words}). Run the output of `manage.py agent_installer "
                "--user {user}` there as root. It allows {user} to run only the agent as root."
            ).format(user=where.user, address=where.address, words=found.words()),
            "host_unreachable",
        )
    if found.exit_code != NOT_INSTALLED:
        raise HostError(
            _("The check of {address} failed: {words}").format(address=where.address, words=found.words()),
            "host_unreachable",
        )
    content = agent_bundle().path.read_bytes()
    argv = ["sh", "-c", INSTALL, "sh", FOLDER, remote_file(), agent_bundle().hash]
    done = remote.run(argv, stdin=content, seconds=60)
    if done.exit_code:
        raise HostError(
            _("The agent cannot be installed on {address}: {words}").format(address=where.address, words=done.words()),
            "host_unreachable",
        )
