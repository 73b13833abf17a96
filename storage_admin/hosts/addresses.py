"""What an admin types about a host that is to be reached over a network, each checked for what it is.

Nobody types a URI or a command line: those are built from these fields alone.
"""

import base64
import hashlib
import ipaddress
import re
import struct

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from django.utils.translation import gettext as _

from storage_admin.errors import of_field

#: Kinds of host keys that are taken; DSA is broken, and certificates name no single key.
HOST_KEYS = frozenset(
    {"ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa"}
)  # fmt: skip
LONGEST_NAME = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}", re.ASCII)


def address(text: str) -> str:
    """A host's name, or its IPv4 or IPv6 address.

    Raises:
        InvalidError: it is none.
    """
    given = text.strip() if isinstance(text, str) else ""
    try:
        return str(ipaddress.IPv6Address(given)) if ":" in given and "%" not in given else _name(given)
    except ValueError:
        raise of_field(
            "address", _("Enter only a hostname or an IP address, such as hv1.example.org or 192.0.2.7.")
        ) from None


def _name(given: str) -> str:
    labels = given.removesuffix(".").split(".")
    if not given.isascii() or len(given) > LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(given)
    if labels[-1].isdigit() or re.fullmatch(r"0[xX][0-9a-fA-F]*", labels[-1]):
        return str(ipaddress.IPv4Address(given))  # anything else that looks like numbers is read in surprising ways
    return given.lower()


def port(value: object, default: int) -> int:
    """A port; raises InvalidError."""
    if value is None or value == "":
        return default
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,5}", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise of_field("port", _("Enter a port number from 1 to 65535."))
    return value


def user(text: str) -> str:
    """The name of a user; raises InvalidError."""
    given = text.strip() if isinstance(text, str) else ""
    if not _USER.fullmatch(given):
        raise of_field("user", _("Enter the name of a user on the host, such as root."))
    return given


def host_key(text: str) -> str:
    """A host's public key as ``TYPE BASE64``, without comment.

    Args:
        text: as in a ``.pub`` file, or as ``ssh-keyscan`` prints it.

    Raises:
        InvalidError: it is none, or of a kind that is not taken.
    """
    words = text.split() if isinstance(text, str) and text.isprintable() else []
    if len(words) > 1 and words[0] not in HOST_KEYS:
        words = words[1:]  # ssh-keyscan puts the address first
    try:
        kind, encoded = words[0], words[1]
        raw = base64.b64decode(encoded, validate=True)
        (length,) = struct.unpack(">I", raw[:4])
        if kind not in HOST_KEYS or raw[4 : 4 + length] != kind.encode() or len(raw) < 40:
            raise ValueError(kind)
    except (IndexError, ValueError, struct.error):
        known = ", ".join(sorted(HOST_KEYS))
        raise of_field(
            "host_key",
            _("Enter a public key as it appears in a .pub file. Supported key types: {known}.").format(known=known),
        ) from None
    return f"{kind} {encoded}"


def fingerprint(key: str) -> str:
    """A public key's fingerprint, as OpenSSH shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def private_key(text: str) -> str:
    """A private key in OpenSSH's or PEM form, with a newline at its end.

    Raises:
        InvalidError: it is none, or needs a passphrase.
    """
    given = text.replace("\r\n", "\n").strip() + "\n" if isinstance(text, str) else ""
    try:
        load = load_ssh_private_key if "BEGIN OPENSSH PRIVATE KEY" in given else load_pem_private_key
        load(given.encode("ascii"), password=None)
    except TypeError:
        raise of_field(
            "private_key", _("This key needs a passphrase, which cannot be entered here. Use a key without one.")
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise of_field("private_key", _("Not a private key. Paste the whole file that ssh-keygen created.")) from None
    return given
