"""Writes: hosts that are reached over a network come and go. Each connection is tried before it is saved."""

import os
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.utils.text import slugify
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.accounts.scopes import GONE
from storage_admin.accounts.services import forget_host
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.errors import Faults, InvalidError, UnconfirmedError, of_field, of_fields
from storage_admin.events.models import Alert
from storage_admin.events.services import close_alert
from storage_admin.hosts import addresses, asking, openvz, secrets, ssh, transport
from storage_admin.hosts.libvirt import reader, tls, uri
from storage_admin.hosts.libvirt.tls import Certificates
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import LONGEST_NAME, STANDARD_FOLDER, add_pool, in_the_way_of_removal, is_name

DEFAULT_PORT = 22
_NO_NAME = f"A host needs a name of at most {LONGEST_NAME} characters."
#: How an admin installs the agent where the key may not do it.
INSTALL_HINT = _(
    "With a forced command, an admin of the host installs the agent. Run the output of `manage.py "
    "agent_installer` there as root."
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


@dataclass(frozen=True)
class WantedLibvirt(Wanted):
    """The same about a host of which only libvirt can be asked.

    Args:
        by_ssh: at its own socket, through ssh; else over TLS.
        certificates: for TLS; without any, those of the data folder's ``pki``, or of libvirt's usual places.
    """

    by_ssh: bool = False
    certificates: Certificates = field(default_factory=Certificates)


def add_libvirt_host(actor: Actor, wanted: WantedLibvirt) -> Host:
    """Registers a host of which only libvirt can be asked. It has to answer.

    Raises:
        As :func:`add_ssh_host`.
    """
    actor.require_everywhere(Role.ADMIN)
    if wanted.by_ssh:
        host = checked(wanted)
        host.kind = Host.Kind.LIBVIRT
    else:
        host = _checked_tls(wanted)
    _try_libvirt(host)
    return save(actor, host)


def _try_libvirt(host: Host) -> None:
    """libvirt has to answer; raises RefusedError, which says what to do."""
    try:
        answer = reader.read(host)
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    if answer is None:
        sentence = gettext("libvirt is not listening on {address}. Install it, or start it (systemctl start libvirtd).")
        raise RefusedError("host_unreachable", sentence.format(address=host.address))


def _checked_tls(wanted: WantedLibvirt) -> Host:
    host, faults = Host(kind=Host.Kind.LIBVIRT, transport=Host.Transport.TLS), Faults()
    with faults:
        named(host, wanted.name)
    with faults:
        host.address = addresses.address(wanted.address)
    with faults:
        host.port = addresses.port(wanted.port, uri.TLS_PORT)
    with faults:
        if wanted.certificates.given:
            tls.keep(host, tls.check(wanted.certificates))
    if faults:
        raise of_fields(faults)
    return host


def named(host: Host, name: str) -> Host:
    """The row with its name; raises InvalidError."""
    host.name = name.strip() if isinstance(name, str) else ""
    if not host.name or not is_name(host.name):
        raise of_field("name", _NO_NAME)
    return host


def save(actor: Actor, host: Host) -> Host:
    """Saves a host whose connection was tried."""
    with transaction.atomic():
        host.slug = _free_slug(host.name)
        host.save()
        audit(actor, "host added", host, after=_shown(host))
    by_agent = {Host.Transport.SSH, Host.Transport.FORCED, Host.Transport.API_SSH}
    if host.transport in by_agent and host.kind != Host.Kind.LIBVIRT:
        _add_standard_folder(host)
    return host


#: What of a row says how it is reached.
CONNECTION = (
    "address", "port", "user", "transport", "host_key", "private_key_locked", "token_id", "token_locked",
    "tls_fingerprint", "ssh_port", "node", "cluster",
)  # fmt: skip


def change_connection(actor: Actor, host: Host, values: dict[str, Any]) -> Host:
    """Changes how a host is reached by ssh or libvirt, which takes what adding one takes; what is not given stays.

    Args:
        values: fields of :class:`Wanted`, or of :class:`WantedLibvirt`. A secret that is not given stays, too.

    Raises:
        As :func:`add_ssh_host`.
    """
    actor.require_everywhere(Role.ADMIN)
    if host.kind == Host.Kind.LOCAL:
        raise InvalidError(
            gettext("The dashboard's own machine has no address to set."), {"address": gettext("Leave this field out.")}
        )
    if host.transport == Host.Transport.TLS:
        changed = _checked_tls(
            WantedLibvirt(
                host.name, values.get("address", host.address), values.get("port", host.port),
                certificates=values.get("certificates", Certificates()),
            )
        )  # fmt: skip
        if not changed.host_key:
            changed.host_key, changed.private_key_locked = host.host_key, host.private_key_locked
        changed.slug = host.slug
        _try_libvirt(changed)
        return changed_to(actor, host, changed)
    known = {
        "name": host.name, "address": host.address, "port": host.port, "user": host.user,
        "private_key": stored(host.private_key_locked, "private_key", values), "host_key": host.host_key,
        "forced": host.transport == Host.Transport.FORCED,
    }  # fmt: skip
    changed = checked(Wanted(**(known | {name: value for name, value in values.items() if name in known})))
    changed.pk, changed.slug, changed.kind = host.pk, host.slug, host.kind
    if host.kind == Host.Kind.LIBVIRT:
        _try_libvirt(changed)
    else:
        transport.forget_installed(transport.endpoint(changed))
        try_agent(changed)
    return changed_to(actor, host, changed)


def stored(locked: bytes | memoryview, name: str, values: dict[str, Any]) -> str:
    """A secret as it is saved, for what is not given anew; nobody has to be able to read one that is replaced.

    Raises:
        InvalidError: it cannot be read with this key of the secrets.
    """
    if name in values:
        return ""
    try:
        return secrets.unlock(locked)
    except HostError as error:
        raise of_field(name, error.detail) from error


def changed_to(actor: Actor, host: Host, changed: Host) -> Host:
    """Writes the connection of a row that was tried into the one that is saved.

    Raises:
        InvalidError: a job rewrites something there: its guests would be asked about at another place than it works at.
    """
    moves = any(getattr(host, name) != getattr(changed, name) for name in ("address", "port", "ssh_port", "node"))
    if moves and host.jobs.filter(state="running", rewrites=True).exists():
        raise InvalidError(
            gettext(
                "The address cannot be changed: a job is running on {host}. Wait for the job to finish, or cancel it."
            ).format(host=host.name)
        )
    before = _shown(host)
    for column in CONNECTION:
        setattr(host, column, getattr(changed, column))
    with transaction.atomic():
        host.save(update_fields=CONNECTION)
        audit(actor, "host changed", host, before=before, after=_shown(host))
    return host


def remove_host(actor: Actor, host: Host) -> None:
    """Forgets a host, its pools, images, guests and jobs, but for the lines of the ledger. Nothing there is touched.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: it is this machine, or a job or an undo copy would be left alone there.
    """
    actor.require(Role.ADMIN, host.slug)
    if host.kind == Host.Kind.LOCAL:
        raise InvalidError(
            gettext("The dashboard's own machine cannot be removed. To stop managing its images, remove its pools.")
        )
    with transaction.atomic():
        Host.objects.select_for_update().get(pk=host.pk)  # no job is submitted meanwhile
        if why := in_the_way_of_removal(host):
            raise InvalidError(why)
        audit(actor, "host removed", host, before=_shown(host))
        forget_host(actor, host.slug)
        host.delete()
        _forget_alerts(host.slug)


def _forget_alerts(slug: str) -> None:
    """What was wrong on a host is over with it, and is no word about a host that gets the same slug later."""
    for key in Alert.objects.filter(host=slug, closed=None).values_list("key", flat=True):
        close_alert(key)
    longest = Alert._meta.get_field("host").max_length or 0
    gone = slug[: longest - len(GONE)] + GONE
    Alert.objects.filter(host=slug).update(host=gone)
    Alert.objects.filter(told_under=slug).update(told_under=gone)


def checked(wanted: Wanted) -> Host:
    """An unsaved row of fields that are what they should be; raises InvalidError or UnconfirmedError."""
    host, faults, private_key = Host(kind=Host.Kind.SSH), Faults(), ""
    with faults:
        host.address = addresses.address(wanted.address)
    with faults:
        host.port = port = addresses.port(wanted.port, DEFAULT_PORT)
    with faults:
        host.user = addresses.user(wanted.user)
    with faults:
        host.host_key = addresses.host_key(wanted.host_key) if wanted.host_key else ""
    with faults:
        private_key = addresses.private_key(wanted.private_key) if wanted.private_key else ""
    with faults:
        named(host, wanted.name)
    if faults:
        raise of_fields(faults)
    if not host.host_key:
        raise _unconfirmed(host.address, port)
    host.private_key_locked = secrets.lock(private_key)
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
        gettext(
            "{address} has the host key {shown} ({kind}). Run `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on the "
            "host and compare. Confirm only if the fingerprints match."
        ).format(address=address, shown=shown, kind=kind),
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
    is_certificate = host.transport == Host.Transport.TLS
    return {
        "kind": host.kind, "address": host.address, "port": host.port, "user": host.user, "transport": host.transport,
        "host_key": addresses.fingerprint(host.host_key) if host.host_key and not is_certificate else "",
        "own_key": bool(host.private_key_locked), "node": host.node, "token_id": host.token_id,
        "tls_fingerprint": host.tls_fingerprint,
    }  # fmt: skip
