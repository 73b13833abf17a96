"""Writes: hosts that are reached over a network come and go. Each connection is tried before it is saved."""

import os
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils.text import slugify

from storage_admin.accounts.roles import Actor, Role
from storage_admin.accounts.services import audit
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import addresses, asking, libvirt_reader, libvirt_uri, openvz, secrets, ssh, transport
from storage_admin.hosts.errors import InvalidError, UnconfirmedError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import STANDARD_FOLDER, add_pool

DEFAULT_PORT = 22
LONGEST_NAME = 200
_NO_NAME = f"A host needs a name of at most {LONGEST_NAME} characters."
#: How an admin installs the agent where the key may not do it.
INSTALL_HINT = (
    "With a forced command the agent is installed by an admin of that host: run there as root what "
    "`manage.py agent_installer` prints."
)


@dataclass(frozen=True)
class Wanted:
    """What an admin typed about a host that is reached by ssh.

    Args:
        private_key: ours; empty for the keys of the user that the dashboard runs as.
        host_key: the key that the host is to show; empty to be told which it shows.
        forced: the key can only run the agent there, by a forced command.
    """

    name: str
    address: str
    port: object = None
    user: str = "root"
    private_key: str = ""
    host_key: str = ""
    forced: bool = False


def add_ssh_host(actor: Actor, wanted: Wanted) -> Host:
    """Registers a host that is reached by ssh. The agent is installed there, and has to answer as root.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: a field is not what it should be; it names each.
        UnconfirmedError: there is no ``host_key``: it has the strongest that the host shows.
        RefusedError: the connection does not work; says what to do.
    """
    actor.require_everywhere(Role.ADMIN)
    host = checked(wanted)
    try_agent(host)
    return save(actor, host)


def add_libvirt_host(actor: Actor, name: str, address: str, port: object = None) -> Host:
    """Registers a host of which only libvirt can be asked, over TLS.

    The certificates are in the data folder's ``pki``, or in libvirt's usual places (``/etc/pki``).

    Raises:
        As :func:`add_ssh_host`.
    """
    actor.require_everywhere(Role.ADMIN)
    host = named(Host(kind=Host.Kind.LIBVIRT, transport=Host.Transport.TLS), name)
    host.address, host.port = addresses.address(address), addresses.port(port, libvirt_uri.TLS_PORT)
    try:
        libvirt_reader.read(host)
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    return save(actor, host)


def named(host: Host, name: str) -> Host:
    """The row with its name; raises InvalidError."""
    host.name = name.strip() if isinstance(name, str) else ""
    if not 1 <= len(host.name) <= LONGEST_NAME or not host.name.isprintable():
        raise InvalidError(_NO_NAME, {"name": _NO_NAME})
    return host


def save(actor: Actor, host: Host) -> Host:
    """Saves a host whose connection was tried."""
    with transaction.atomic():
        host.slug = _free_slug(host.name)
        host.save()
        audit(actor, "host added", host, after=_shown(host))
    if host.transport in {Host.Transport.SSH, Host.Transport.FORCED, Host.Transport.API_SSH}:
        _add_standard_folder(host)
    return host


def change_connection(actor: Actor, host: Host, values: dict[str, Any]) -> Host:
    """Changes how a host is reached; what is not given stays.

    Args:
        values: ``address``, ``port``, ``user``, ``private_key``, ``host_key``.

    Raises:
        As :func:`add_ssh_host`.
    """
    actor.require(Role.ADMIN, host.slug)
    if host.kind == Host.Kind.LOCAL:
        raise InvalidError("This machine is not reached over a network.", {"address": "Leave it out."})
    before = _shown(host)
    known = Wanted(
        host.name, host.address, host.port, host.user, secrets.unlock(host.private_key_locked), host.host_key,
        forced=host.transport == Host.Transport.FORCED,
    )  # fmt: skip
    changed = checked(Wanted(**(vars(known) | values)))
    changed.pk, changed.slug = host.pk, host.slug
    transport.forget_installed(transport.endpoint(changed))
    try_agent(changed)
    columns = ("address", "port", "user", "host_key", "private_key_locked")
    for column in columns:
        setattr(host, column, getattr(changed, column))
    with transaction.atomic():
        host.save(update_fields=columns)
        audit(actor, "host changed", host, before=before, after=_shown(host))
    return host


def remove_host(actor: Actor, host: Host) -> None:
    """Forgets a host, its pools, images, guests and jobs. Nothing on the host is touched.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: it is this machine, or a job or an undo copy would be left alone there.
    """
    actor.require(Role.ADMIN, host.slug)
    if host.kind == Host.Kind.LOCAL:
        raise InvalidError("This machine itself stays: remove its pools, if it is not to be managed.")
    with transaction.atomic():
        Host.objects.select_for_update().get(pk=host.pk)  # no job is submitted meanwhile
        if host.jobs.filter(state__in=("queued", "running")).exists():
            raise InvalidError(f"A job is queued or at work on {host.name}: wait for its end, or cancel it first.")
        if host.jobs.filter(undo_state="available").exists():
            raise InvalidError(
                f"Undo copies wait on {host.name}, which nobody would remove any more: undo or discard them first."
            )
        audit(actor, "host removed", host, before=_shown(host))
        host.delete()


def checked(wanted: Wanted) -> Host:
    """An unsaved row of fields that are what they should be; raises InvalidError or UnconfirmedError."""
    fields: dict[str, str] = {}
    values: dict[str, Any] = {}

    def check(name: str, call: Any, *given: Any) -> None:
        try:
            values[name] = call(*given)
        except InvalidError as error:
            fields.update(error.fields)

    check("address", addresses.address, wanted.address)
    check("port", addresses.port, wanted.port, DEFAULT_PORT)
    check("user", addresses.user, wanted.user)
    if wanted.host_key:
        check("host_key", addresses.host_key, wanted.host_key)
    if wanted.private_key:
        check("private_key", addresses.private_key, wanted.private_key)
    host = Host(kind=Host.Kind.SSH)
    check("name", lambda: named(host, wanted.name))
    if fields:
        raise InvalidError(" ".join(f"{name}: {text}" for name, text in fields.items()), fields)
    if "host_key" not in values:
        raise _unconfirmed(values["address"], values["port"])
    host.address, host.port, host.user = values["address"], values["port"], values["user"]
    host.host_key, host.private_key_locked = values["host_key"], secrets.lock(values.get("private_key", ""))
    host.transport = Host.Transport.FORCED if wanted.forced else Host.Transport.SSH
    return host


def _unconfirmed(address: str, port: int) -> UnconfirmedError:
    try:
        keys = ssh.scan_keys(address, port)
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    kind = keys[0].split(maxsplit=1)[0].removeprefix("ssh-").partition("-")[0]
    shown = addresses.fingerprint(keys[0])
    return UnconfirmedError(
        f"{address} shows the key {shown} ({kind}). Compare it with what "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` says on the host itself; only if it is equal, confirm it.",
        {"host_key": keys[0], "fingerprint": shown},
    )


def try_agent(host: Host) -> None:
    """The agent has to answer, as root; raises RefusedError, which says what to do."""
    hint = f" {INSTALL_HINT}" if host.transport == Host.Transport.FORCED else ""
    try:
        asking.ask(host, "folder", {"path_b64": b64(b"/")})
    except HostError as error:
        if error.code == "tool_missing" and _has_containers(host):
            host.transport = Host.Transport.PLAIN
            return
        raise RefusedError("host_unreachable", error.detail + hint) from error
    except RefusedError as error:
        raise RefusedError(error.code, error.detail + hint) from error


def _has_containers(host: Host) -> bool:
    """Whether a host without Python 3 has OpenVZ, for which plain commands do."""
    try:
        openvz.containers(ssh.SshShell(transport.endpoint(host)))
    except (RefusedError, HostError):
        return False
    return True


def _add_standard_folder(host: Host) -> None:
    try:
        found = asking.ask(host, "folder", {"path_b64": b64(os.fsencode(STANDARD_FOLDER))})
    except (HostError, RefusedError):
        return  # it answered a moment ago; the first scan tells what is wrong now
    if found["kind"] == "folder":
        add_pool(host, os.fsencode(STANDARD_FOLDER), StoragePool.Source.STANDARD)


def _free_slug(name: str) -> str:
    """A slug that no host has; ``local`` is this machine's."""
    stem = slugify(name)[:40] or "host"
    taken = set(Host.objects.filter(slug__startswith=stem).values_list("slug", flat=True)) | {"local"}
    numbered = (f"{stem}-{number}" for number in range(2, len(taken) + 3))
    return stem if stem not in taken else next(slug for slug in numbered if slug not in taken)


def _shown(host: Host) -> dict[str, Any]:
    """What the audit trail says of a host's connection; no secret is among it."""
    return {
        "kind": host.kind, "address": host.address, "port": host.port, "user": host.user, "transport": host.transport,
        "host_key": addresses.fingerprint(host.host_key) if host.host_key else "",
        "own_key": bool(host.private_key_locked),
    }  # fmt: skip
