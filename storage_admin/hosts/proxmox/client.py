"""One API server of Proxmox VE, asked with a token by way of proxmoxer."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote

from django.utils.translation import gettext as _
from proxmoxer.backends.https import Backend
from proxmoxer.core import ProxmoxResource, ResourceException
from requests import Response
from requests.exceptions import ConnectTimeout, RequestException, SSLError, Timeout, TooManyRedirects

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox import errors
from storage_admin.hosts.proxmox.endpoint import Endpoint, Token
from storage_admin.hosts.proxmox.errors import UNREACHABLE, ApiError
from storage_admin.hosts.proxmox.tls import Adapter

CONNECT_SECONDS = 10.0
#: Proxmox VE itself gives up after 30 s (status 596), and lets three pass before it refuses a token.
ANSWER_SECONDS = 45.0

Params = Mapping[str, str | int | bool | None]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: What a path is built from: nodes, ids of guests, storages, snapshots, tasks and volumes.
_PART = re.compile(r"[^\x00-\x20\x7f]+")


class Api(ABC):
    """Calls of Proxmox VE's API, each as data or as an exception with a sentence, whichever way they get there."""

    @property
    @abstractmethod
    def who(self) -> str:
        """Who is asked, and as whom, for a sentence."""

    def close(self) -> None:  # noqa: B027 (not every way has something to close)
        """Ends the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *__: object) -> None:
        self.close()

    @abstractmethod
    def _call(self, verb: str, path: tuple[str | int, ...], params: Params | None) -> Any: ...

    def get(self, *path: str | int, params: Params | None = None) -> Any:
        """The ``data`` of an answer.

        Args:
            path: the parts of the path below ``/api2/json``; each is quoted.
            params: without those that are ``None``; booleans become 0 and 1.

        Raises:
            HostError: it does not answer, or says no (:mod:`~storage_admin.hosts.proxmox.errors`).
            RefusedError: ``guest_locked``, ``stale_plan``, ``busy``.
        """
        return self._call("get", path, params)

    def post(self, *path: str | int, params: Params | None = None) -> Any:
        """As :meth:`get`."""
        return self._call("post", path, params)

    def put(self, *path: str | int, params: Params | None = None) -> Any:
        """As :meth:`get`."""
        return self._call("put", path, params)

    def delete(self, *path: str | int, params: Params | None = None) -> Any:
        """As :meth:`get`. A 200 is no success where it comes with a task: read the task's own end."""
        return self._call("delete", path, params)

    def rows(self, *path: str | int, params: Params | None = None) -> list[dict[str, Any]]:
        """The answer of a call that lists things; raises as :meth:`get`."""
        answer = self.get(*path, params=params)
        if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
            raise self._strange(path)
        return answer

    def fields(self, *path: str | int, params: Params | None = None) -> dict[str, Any]:
        """The answer of a call that tells of one thing; raises as :meth:`get`."""
        answer = self.get(*path, params=params)
        if not isinstance(answer, dict):
            raise self._strange(path)
        return answer

    def _strange(self, path: tuple[str | int, ...]) -> ApiError:
        return ApiError(
            _("{who} sent an unexpected response for /{path}.").format(who=self.who, path="/".join(map(str, path)))
        )


class Client(Api):
    """The API over HTTPS. For one thread at a time.

    Args:
        endpoint: the server.
        token: which is sent there alone, and never before the certificate is found good.
        seconds: that an answer may take.
    """

    def __init__(self, endpoint: Endpoint, token: Token, seconds: float = ANSWER_SECONDS) -> None:
        self.endpoint = endpoint
        self._token = token
        backend = Backend(
            f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address,
            port=endpoint.port,
            user=token.user,
            token_name=token.name,
            token_value=token.secret,
            verify_ssl=True,
            timeout=(min(CONNECT_SECONDS, seconds), seconds),
        )
        self._session = backend.get_session()
        # Nothing of the environment: no proxy, no netrc, no authorities. And nobody is followed anywhere.
        self._session.trust_env = False
        self._session.max_redirects = 0
        self._session.mount("https://", Adapter(endpoint, seconds))
        self._root = ProxmoxResource(
            base_url=backend.get_base_url(), session=self._session, serializer=_Serializer()
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Proxmox VE at {self.endpoint.netloc} as {self._token.token_id}>"

    @property
    def who(self) -> str:
        """Server and token, for a sentence."""
        return f"Proxmox VE at {self.endpoint.netloc} (token {self._token.token_id})"

    def close(self) -> None:
        self._session.close()

    def _call(self, verb: str, path: tuple[str | int, ...], params: Params | None) -> Any:
        call = getattr(self._root([_quoted(part) for part in path]), verb)
        given = {
            name: int(value) if isinstance(value, bool) else value
            for name, value in (params or {}).items()
            if value is not None
        }
        # Raised outside of the handlers: what requests raises holds the request, and that holds the secret.
        failure: HostError | RefusedError
        try:
            return call(**given)
        except ResourceException as answer:
            failure = self._answered(answer)
        except _NotJsonError:
            failure = ApiError(
                _("{who} does not respond like the Proxmox VE API. Check the address.").format(who=self.who)
            )
        except RequestException as error:
            failure = self._unreachable(error)
        raise failure

    def _answered(self, answer: Any) -> HostError | RefusedError:
        told = answer.errors if isinstance(answer.errors, dict) else {}
        fields = told.get("errors")
        return errors.of_answer(
            self.who,
            int(answer.status_code),
            self._scrubbed(str(answer.content)),
            self._scrubbed(str(told.get("message") or "")),
            {str(k): self._scrubbed(str(v)) for k, v in fields.items()} if isinstance(fields, dict) else None,
        )

    def _unreachable(self, error: RequestException) -> ApiError:
        where = f"Proxmox VE at {self.endpoint.netloc}"
        if isinstance(error, SSLError):
            return ApiError(f"{where} shows {_why_not(str(error), bool(self.endpoint.fingerprint))}", UNREACHABLE)
        if isinstance(error, ConnectTimeout):
            return ApiError(_("{where} cannot be reached: no answer in time.").format(where=where), UNREACHABLE)
        if isinstance(error, Timeout):
            return errors.NoAnswerError(
                _("{where} accepted the request, but did not answer in time.").format(where=where), UNREACHABLE
            )
        if isinstance(error, TooManyRedirects):
            return ApiError(
                _("{where} redirects to another address. Check the address.").format(where=where), UNREACHABLE
            )
        found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
        why = found[1] if found else _("the connection was lost")
        return ApiError(_("{where} cannot be reached: {why}.").format(where=where, why=why), UNREACHABLE)

    def _scrubbed(self, text: str) -> str:
        return text.replace(self._token.secret, "…")


def _quoted(part: str | int) -> str:
    """One part of a path, which stays one part whatever is in it."""
    text = str(part)
    if not _PART.fullmatch(text) or text in (".", ".."):
        raise ApiError(_("{text!r} is not a valid name in Proxmox VE.").format(text=text))
    return quote(text, safe=":@!,")


def _why_not(said: str, pinned: bool) -> str:
    """What is wrong with a certificate, from the words of OpenSSL and urllib3."""
    if "ingerprints did not match" in said:
        return _(
            "a certificate that differs from the pinned one. If it was renewed, compare the new fingerprint on "
            "the node itself, then pin it. Otherwise, someone may be intercepting the connection."
        )
    if "doesn't match" in said or "mismatch" in said.lower():
        return _("a certificate for another name. Pin its fingerprint, or use a name from the certificate.")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return _("a certificate that no trusted CA signed. Pin its fingerprint, or provide the CA's certificate.")
    return _("no valid TLS.") if pinned else _("no valid TLS, or no certificate that can be verified.")


def _as_text(data: Any) -> Any:
    """Without halves of characters, which JSON can name and nothing can store."""
    if isinstance(data, str):
        return data.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(data, list):
        return [_as_text(one) for one in data]
    if isinstance(data, dict):
        return {_as_text(key): _as_text(value) for key, value in data.items()}
    return data


class _NotJsonError(Exception):
    """A good status, and a body that is no answer of the API."""


class _Serializer:
    """Answers as JSON; unlike proxmoxer's own it takes nothing else for an answer."""

    @staticmethod
    def loads(response: Response) -> Any:
        """The ``data`` of a good answer."""
        try:
            data = json.loads(response.content.decode("utf-8"))["data"]
        except (UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError):
            raise _NotJsonError from None
        return _as_text(data) if _SURROGATE.search(response.content) else data

    @staticmethod
    def loads_errors(response: Response) -> dict[str, Any]:
        """What an answer with an error says; nothing where it has no proper body, as with 401 and 596."""
        try:
            told = json.loads(response.content.decode("utf-8"))
        except (UnicodeDecodeError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}
