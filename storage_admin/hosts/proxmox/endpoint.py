"""Where Proxmox VE's API is reached and by which token: fields that are checked one by one, never a URL."""

import re
from dataclasses import dataclass, field

from django.utils.translation import gettext as _

from storage_admin.errors import of_field
from storage_admin.hosts import addresses

DEFAULT_PORT = 8006

#: As Proxmox VE's access control has them (user, realm, name of the token), in printable ASCII: they go into a header.
_TOKEN_ID = re.compile(
    r"(?P<user>[!-~]{1,64}@[A-Za-z][A-Za-z0-9._-]{0,31})!(?P<name>[A-Za-z][A-Za-z0-9._-]{0,63})", re.ASCII
)
_SECRET = re.compile(r"[0-9A-Za-z._-]{8,128}", re.ASCII)
_SHA256 = re.compile(r"[0-9A-F]{64}", re.ASCII)


@dataclass(frozen=True)
class Endpoint:
    """An API server.

    Args:
        address: a host's name or address.
        port: Proxmox VE listens on 8006.
        fingerprint: SHA-256 of the one certificate that it may show; empty where an authority that this machine knows
            has to have signed that.

    Raises:
        InvalidError: a field is not what it should be.
    """

    address: str
    port: int = DEFAULT_PORT
    fingerprint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", addresses.address(self.address))
        object.__setattr__(self, "port", addresses.port(self.port, DEFAULT_PORT))
        object.__setattr__(self, "fingerprint", fingerprint(self.fingerprint))

    @property
    def netloc(self) -> str:
        """Address and port as in a URL."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Token:
    """An API token.

    Args:
        token_id: ``USER@REALM!NAME``.
        secret: shown once by Proxmox VE, a UUID.

    Raises:
        InvalidError: a field is not what it should be.
    """

    token_id: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        _parts(self.token_id)
        if not isinstance(self.secret, str) or not _SECRET.fullmatch(self.secret):
            raise of_field(
                "token_secret", _("Enter the token secret that Proxmox VE showed when the token was created.")
            )

    @property
    def user(self) -> str:
        """``USER@REALM``."""
        return _parts(self.token_id)[0]

    @property
    def name(self) -> str:
        """The token's own name."""
        return _parts(self.token_id)[1]


def fingerprint(text: str) -> str:
    """A SHA-256 fingerprint in Proxmox VE's form, ``AB:CD:…``; empty for an empty one.

    Raises:
        InvalidError: it is none. Shorter digests than SHA-256 are not taken.
    """
    if not isinstance(text, str):
        raise of_field("tls_fingerprint", _("The fingerprint must be text."))
    plain = text.strip().upper().replace(":", "")
    if not plain:
        return ""
    if not _SHA256.fullmatch(plain):
        raise of_field(
            "tls_fingerprint",
            _(
                "Enter the SHA-256 fingerprint of the certificate: 64 hexadecimal digits, as shown under the "
                "node's certificates in Proxmox VE."
            ),
        )
    return ":".join(plain[i : i + 2] for i in range(0, 64, 2))


def _parts(token_id: str) -> tuple[str, str]:
    found = _TOKEN_ID.fullmatch(token_id) if isinstance(token_id, str) else None
    # Proxmox VE allows neither of these in a user's name.
    if found is None or re.search(r"[:/]", found["user"]):
        raise of_field("token_id", _("Enter the token ID as USER@REALM!NAME, such as dashboard@pve!storage-admin."))
    return found["user"], found["name"]
