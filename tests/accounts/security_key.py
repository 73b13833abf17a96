"""A security key in software, as a browser hands its answers on."""

import hashlib
import json
import os
import struct
from typing import Any

from allauth.account.utils import user_pk_to_url_str
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from fido2 import cbor
from fido2.cose import ES256
from fido2.utils import websafe_encode

from storage_admin.accounts.models import User

#: The host that pages are asked at, and the origin that the browser tells: without TLS there is no other.
HOST = "localhost"
#: What the key says of itself: somebody touched it; and gave their PIN or finger as well.
TOUCHED, VERIFIED = 0x01, 0x05
_HAS_A_CREDENTIAL = 0x40


class SecurityKey:
    """One credential of one user."""

    def __init__(self, user: User) -> None:
        self._private = ec.generate_private_key(ec.SECP256R1())
        self._id = os.urandom(16)
        self._user = websafe_encode(user_pk_to_url_str(user).encode())

    def registered(self, challenge: str, extensions: dict[str, Any]) -> str:
        """The answer to a page that adds it, with what the browser reports beside it."""
        public = cbor.encode(dict(ES256.from_cryptography_key(self._private.public_key())))  # type: ignore[no-untyped-call]
        credential = bytes(16) + struct.pack(">H", len(self._id)) + self._id + public
        said = {"fmt": "none", "attStmt": {}, "authData": _data(VERIFIED | _HAS_A_CREDENTIAL) + credential}
        answer = {
            "clientDataJSON": websafe_encode(_client("create", challenge)),
            "attestationObject": websafe_encode(cbor.encode(said)),
        }
        return self._told(answer, extensions)

    def signed(self, challenge: str, flags: int) -> str:
        """The answer to a page that asks for it."""
        data, client = _data(flags), _client("get", challenge)
        signature = self._private.sign(data + hashlib.sha256(client).digest(), ec.ECDSA(hashes.SHA256()))
        answer = {
            "clientDataJSON": websafe_encode(client), "authenticatorData": websafe_encode(data),
            "signature": websafe_encode(signature), "userHandle": self._user,
        }  # fmt: skip
        return self._told(answer, {})

    def _told(self, response: dict[str, str], extensions: dict[str, Any]) -> str:
        name = websafe_encode(self._id)
        told = {"id": name, "rawId": name, "type": "public-key", "clientExtensionResults": extensions}
        return json.dumps(told | {"response": response})


def _data(flags: int) -> bytes:
    return hashlib.sha256(HOST.encode()).digest() + bytes([flags]) + struct.pack(">I", 1)


def _client(what: str, challenge: str) -> bytes:
    told = {"type": f"webauthn.{what}", "challenge": challenge, "origin": f"http://{HOST}"}
    return json.dumps(told).encode()
