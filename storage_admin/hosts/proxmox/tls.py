"""TLS to an API server: the certificate is the pinned one, or signed by an authority that counts. Never neither."""

import hashlib
import socket
import ssl
import time
from typing import Any

from django.utils.translation import gettext as _
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import ConnectionError as LostError
from requests.exceptions import TooManyRedirects

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.proxmox.endpoint import Endpoint
from storage_admin.hosts.proxmox.errors import UNREACHABLE

#: Longest answer that is taken, in bytes: 100,000 volumes are about 20 MB.
MAX_ANSWER = 64 * 1024 * 1024
_CHUNK = 256 * 1024


def context(endpoint: Endpoint) -> ssl.SSLContext:
    """What a connection is judged by; of a pinned certificate only the fingerprint counts (:class:`Adapter`)."""
    return _unjudged() if endpoint.fingerprint else ssl.create_default_context()


def shown_fingerprint(endpoint: Endpoint, seconds: float = 10.0) -> str:
    """The SHA-256 fingerprint of the certificate that a server shows, for an admin to compare. Sends no request.

    Args:
        seconds: for the connection and for the greeting, each.

    Raises:
        HostError: nobody answers there, or not with TLS.
    """
    try:
        with (
            socket.create_connection((endpoint.address, endpoint.port), seconds) as plain,
            _unjudged().wrap_socket(plain, server_hostname=endpoint.address) as secured,
        ):
            certificate = secured.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise HostError(
            _("{netloc} does not respond like a Proxmox VE server: {why}.").format(netloc=endpoint.netloc, why=why),
            UNREACHABLE,
        ) from None
    digits = hashlib.sha256(certificate).hexdigest().upper()
    return ":".join(digits[i : i + 2] for i in range(0, 64, 2))


def _unjudged() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made


class Adapter(HTTPAdapter):
    """Connections to one server, judged by its :class:`Endpoint` alone, with answers of bounded size and time.

    Args:
        endpoint: the server.
        seconds: that an answer may take in all, once its head has come.
    """

    def __init__(self, endpoint: Endpoint, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Pools whose connections are judged as the endpoint says."""
        kwargs["ssl_context"] = context(self._endpoint)
        if self._endpoint.fingerprint:
            # Compared right after the handshake, before the first byte of a request.
            kwargs["assert_fingerprint"] = self._endpoint.fingerprint
        super().init_poolmanager(*args, **kwargs)

    def build_connection_pool_key_attributes(self, request: PreparedRequest, verify: Any, cert: Any = None) -> Any:
        """No TLS settings of a request's own: requests would add the authorities that it brings along."""
        host, __ = super().build_connection_pool_key_attributes(request, verify, cert)
        return host, {}

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
        """Nothing: the context says it all."""

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """One request, with its whole answer."""
        kwargs["stream"] = True
        response = super().send(request, *args, **kwargs)
        if 300 <= response.status_code < 400:  # proxmoxer takes these for empty answers
            response.close()
            raise TooManyRedirects(f"status {response.status_code}")
        content, end = bytearray(), time.monotonic() + self._seconds
        try:
            for chunk in response.iter_content(_CHUNK):
                content += chunk
                if len(content) > MAX_ANSWER or time.monotonic() > end:
                    raise LostError(_("the response is too large or took too long"))
        finally:
            response.close()
        # As requests itself keeps an answer that it has read.
        response._content, response._content_consumed = bytes(content), True  # type: ignore[attr-defined]
        return response
