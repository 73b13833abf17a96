"""What is asked about a host, by the way that it is reached; secrets that were typed stay on this side of the page."""

import copy
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host

#: Where a session keeps them, and for how many seconds.
DRAFT, LASTS = "host_secrets", 1800


@dataclass(frozen=True)
class Field:
    """One input.

    Args:
        shape: ``line``, ``secret`` (a line that is not shown), ``text`` (several lines) or ``secret text``.
        required: where the host is new.
    """

    name: str
    word: str | Promise
    example: str = ""
    hint: str | Promise = ""
    shape: str = "line"
    required: bool = False

    @property
    def is_secret(self) -> bool:
        return self.shape.startswith("secret")


_KEPT = _("Encrypted when saved, and never shown again.")
NAME = Field("name", _("Display name"), "hv1", required=True)
ADDRESS = Field("address", _("Hostname or IP address"), "hv1.example.org", required=True)
PORT = Field("port", _("SSH port"), "22")
USER = Field("user", _("User"), "root", _("Users other than root need passwordless sudo."))
KEY = Field(
    "private_key", _("Private key (without a passphrase)"), shape="secret text",
    hint=_(
        "Encrypted when saved, and never shown again. Leave empty to use the SSH keys of the user that the dashboard "
        "runs as."
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to reach a host.

    Args:
        word: as in a list of ways.
        fields: in their order on the page.
        ssh_fields: those that count only where ``by_ssh`` is ticked.
    """

    name: str
    word: str | Promise
    fields: tuple[Field, ...]
    ssh_fields: tuple[Field, ...] = ()

    @property
    def all_fields(self) -> tuple[Field, ...]:
        return (*self.fields, *self.ssh_fields)


WAYS = {
    way.name: way
    for way in (
        Way("ssh", _("SSH: all features"), (NAME, ADDRESS, PORT, USER, KEY)),
        Way(
            "proxmox",
            _("Proxmox VE: API, with or without SSH"),
            (
                Field("name", _("Display name"), "pve1", _("Leave empty to use the node's name.")),
                replace(ADDRESS, example="pve1.example.org", hint=_("Any node of the cluster.")),
                Field("port", _("API port"), "8006"),
                Field("token_id", _("API token ID"), "dashboard@pve!storage-admin", "USER@REALM!NAME", required=True),
                Field("token_secret", _("API token secret"), "", _KEPT, "secret", required=True),
                Field(
                    "tls_fingerprint", _("Certificate fingerprint (SHA-256)"),
                    hint=_("Leave empty to compare it in the next step, or if a trusted CA signed the certificate."),
                ),
            ),
            (
                Field("ssh_port", _("SSH port"), "22"),
                USER,
                KEY,
            ),
        ),
        Way("libvirt-tls", _("libvirt over TLS: inventory and guest I/O settings"), (
            NAME,
            ADDRESS,
            Field("port", _("libvirt TLS port"), "16514"),
            Field("ca_cert", _("CA certificate (cacert.pem)"), shape="text",
                  hint=_("The CA that signed the host's certificate. Leave all three fields empty to use the files in "
                  "pki/ of the data folder, or in /etc/pki.")),
            Field("client_cert", _("Client certificate (clientcert.pem)"), shape="text",
                  hint=_("Must be signed by a CA that the host trusts.")),
            Field("client_key", _("Client key (clientkey.pem)"), hint=_KEPT, shape="secret text"),
        )),
        Way("libvirt-ssh", _("libvirt over SSH: inventory and guest I/O settings"), (
            NAME, ADDRESS, PORT,
            Field("user", _("User"), "root",
                  _("Needs access to libvirt's socket: root, or a member of the group libvirt.")),
            KEY,
        )),
    )
}  # fmt: skip


def way_of(host: Host) -> Way | None:
    """How a saved host is reached; ``None`` for this machine."""
    if host.kind == Host.Kind.LIBVIRT:
        return WAYS["libvirt-tls" if host.transport == Host.Transport.TLS else "libvirt-ssh"]
    return WAYS.get(host.kind)


def given_of(host: Host) -> dict[str, str]:
    """What a saved host's form begins with; no secret is among it."""
    port = "" if host.port is None else str(host.port)
    return {
        "name": host.name, "address": host.address, "port": port, "user": host.user, "token_id": host.token_id,
        "tls_fingerprint": host.tls_fingerprint, "ssh_port": "" if host.ssh_port is None else str(host.ssh_port),
    }  # fmt: skip


class Typed:
    """What was typed into a form, secrets from an earlier step of it among them.

    Args:
        post: of the request.
        session: where secrets stay, encrypted, between two steps; the page only has the draft's id.
    """

    def __init__(self, way: Way, post: Mapping[str, str], session: Any) -> None:
        self._way, self._session = way, session
        self.values = {field.name: post.get(field.name, "") for field in way.all_fields}
        kept = _kept(session, post.get("draft", ""))
        self._draft = post.get("draft", "") if kept else uuid.uuid4().hex
        for field in way.all_fields:
            if field.is_secret and not self.values[field.name].strip():
                self.values[field.name] = kept.get(field.name, "")
        has_key = KEY in (way.all_fields if "by_ssh" in post else way.fields)
        self.creates_key = has_key and post.get("key") == "create"
        if self.creates_key:
            self.values[KEY.name] = ""

    def with_key(self, private_key: str) -> "Typed":
        """The same with a key that was created; it is kept with its pair, and not for the next step of the form."""
        given = copy.copy(self)
        given.values = self.values | {KEY.name: private_key}
        return given

    def keep(self) -> str:
        """Keeps the secrets for the next step; the id that the page sends back. Empty where there are none."""
        found = {field.name: self.values[field.name] for field in self._way.all_fields if field.is_secret}
        found = {name: text for name, text in found.items() if text}
        if not found:
            forget(self._session)
            return ""
        locked = secrets.lock(json.dumps(found)).decode()
        self._session[DRAFT] = {"id": self._draft, "until": time.time() + LASTS, "locked": locked}
        return self._draft

    def shown(self) -> dict[str, str]:
        """The values that may stand on a page."""
        return {field.name: self.values[field.name] for field in self._way.all_fields if not field.is_secret}

    def held(self) -> set[str]:
        """Names of the secrets that were typed."""
        return {field.name for field in self._way.all_fields if field.is_secret and self.values[field.name]}


def forget(session: Any) -> None:
    """Drops the secrets of a form that is done with."""
    session.pop(DRAFT, None)


def _kept(session: Any, draft: str) -> dict[str, str]:
    found = session.get(DRAFT)
    if not isinstance(found, dict) or not draft or found.get("id") != draft or found.get("until", 0) < time.time():
        return {}
    try:
        return {str(name): str(text) for name, text in json.loads(secrets.unlock(found["locked"].encode())).items()}
    except HostError:
        return {}
