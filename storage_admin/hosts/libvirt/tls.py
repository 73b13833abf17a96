"""Our certificate for libvirt over TLS, where a host has one of its own: in its row, the key encrypted.

What the host has to show, a certificate of that authority, is in ``host_key``; our certificate and its key are in
``private_key_locked``. libvirt wants files: while a connection lasts, they are in a private folder.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from django.utils.translation import gettext as _

from storage_admin.errors import of_fields
from storage_admin.hosts import secrets, ssh
from storage_admin.hosts.models import Host

LONGEST = 100_000
_PUBLIC = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Certificates:
    """Three files in PEM form.

    Args:
        ca: of the authority that signed the host's certificate.
        client: ours, which the host's libvirt trusts.
        key: of that; without a passphrase.
    """

    ca: str = ""
    client: str = ""
    key: str = field(default="", repr=False)

    @property
    def given(self) -> bool:
        """Whether there is any: else libvirt takes those of the data folder, or of its usual places."""
        return bool(self.ca.strip() or self.client.strip() or self.key.strip())


def check(given: Certificates) -> Certificates:
    """The same, each what it should be, with a newline at its end.

    Raises:
        InvalidError: it names each field that is wrong: ``ca_cert``, ``client_cert``, ``client_key``.
    """
    plain = Certificates(*(text.replace("\r\n", "\n").strip() + "\n" for text in (given.ca, given.client, given.key)))
    fields: dict[str, str] = {}
    _authority, client = _certificate(plain.ca, "ca_cert", fields), _certificate(plain.client, "client_cert", fields)
    key = _key(plain.key, fields)
    if client is not None and key is not None and client.public_key().public_bytes(*_PUBLIC) != key:
        fields["client_key"] = _("This key does not match the client certificate.")
    if fields:
        raise of_fields(fields)
    return plain


def _certificate(pem: str, name: str, fields: dict[str, str]) -> x509.Certificate | None:
    whose = _("the CA certificate (cacert.pem)") if name == "ca_cert" else _("the client certificate (clientcert.pem)")
    try:
        if len(pem) > LONGEST or "PRIVATE KEY" in pem:
            raise ValueError("no certificate")
        return x509.load_pem_x509_certificates(pem.encode("ascii"))[0]
    except ValueError:
        fields[name] = _("Paste the whole file of {whose}, including its BEGIN and END lines.").format(whose=whose)
        return None


def _key(pem: str, fields: dict[str, str]) -> bytes | None:
    """The public half of a private key."""
    try:
        if len(pem) > LONGEST:
            raise ValueError("too long")
        return load_pem_private_key(pem.encode("ascii"), password=None).public_key().public_bytes(*_PUBLIC)
    except TypeError:
        fields["client_key"] = _("This key needs a passphrase, which cannot be entered here. Use a key without one.")
    except (ValueError, UnsupportedAlgorithm):
        fields["client_key"] = _(
            "Paste the whole file of the client key (clientkey.pem), including its BEGIN and END lines."
        )
    return None


def keep(host: Host, certificates: Certificates) -> None:
    """Writes checked certificates into a host's row, which is not saved here."""
    host.host_key = certificates.ca
    host.private_key_locked = secrets.lock(json.dumps({"client": certificates.client, "key": certificates.key}))


@contextlib.contextmanager
def folder_of(host: Host) -> Iterator[Path | None]:
    """A folder with a host's own certificates as libvirt names them, there as long as the context lasts.

    Yields:
        ``None`` for a host that has none of its own.

    Raises:
        HostError: they cannot be read with this key of the secrets.
    """
    if not host.host_key or not host.private_key_locked:
        yield None
        return
    ours = json.loads(secrets.unlock(host.private_key_locked))
    with ssh.private_folder() as name:
        folder = Path(name)
        files = {"cacert.pem": host.host_key, "clientcert.pem": ours["client"], "clientkey.pem": ours["key"]}
        for file, text in files.items():
            (folder / file).touch(mode=0o600)
            (folder / file).write_text(text)
        yield folder
