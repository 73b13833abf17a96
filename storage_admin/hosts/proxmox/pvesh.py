"""The API of Proxmox VE by ``pvesh``, its own command on a node: for root there, where no token was given.

The calls, and what they answer, are those of the API: ``pvesh VERB PATH --KEY VALUE``. An error is told in words alone,
and a change prints what it does before its answer, or instead of one (``update VM 106: -description hello``).
"""

import json
import re
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox import errors
from storage_admin.hosts.proxmox.client import Api, Params
from storage_admin.hosts.proxmox.errors import ApiError
from storage_admin.hosts.shells import Shell

#: Proxmox VE gives up after 30 s by itself, and Perl takes its time to start.
SECONDS = 45.0
_VERBS = {"get": "get", "put": "set", "post": "create", "delete": "delete"}
_PART = re.compile(r"[A-Za-z0-9_.:@!-]+", re.ASCII)
#: Warnings may stand above it.
_STATUS = re.compile(r"^(\d{3}) (.*)", re.DOTALL | re.MULTILINE)
_NO_SUCH_CALL = re.compile(r"^No '\w+' handler defined", re.MULTILINE)


class Pvesh(Api):
    """A node's own command.

    Args:
        shell: runs commands there as root.
        host: its name, for sentences.
    """

    def __init__(self, shell: Shell, host: str) -> None:
        self._shell = shell
        self._host = host

    @property
    def who(self) -> str:
        return f"pvesh on {self._host}"

    def _call(self, verb: str, path: tuple[str | int, ...], params: Params | None) -> Any:
        parts = [str(part) for part in path]
        if not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
            raise ApiError(_("{parts!r} is not a valid path in Proxmox VE.").format(parts=parts))
        # In a language that the node has not, Perl warns of that above every error.
        argv = ["env", "LC_ALL=C", "pvesh", _VERBS[verb], "/" + "/".join(parts)]
        for name, value in (params or {}).items():
            if value is not None:
                argv += [f"--{name}", str(int(value) if isinstance(value, bool) else value)]
        done = self._shell.run([*argv, "--output-format", "json"], seconds=SECONDS)
        if done.exit_code != 0:
            raise self._failed(done.exit_code, (done.stderr or done.stdout).decode("utf-8", "replace").strip())
        text = done.stdout.decode("utf-8", "replace").strip()
        try:
            return json.loads(text if verb == "get" else text.rpartition("\n")[2])
        except ValueError:
            if verb != "get":
                return None  # it ended well and has nothing to answer but words
            raise ApiError(_("{who} sent a response that is not JSON.").format(who=self.who)) from None

    def _failed(self, exit_code: int, said: str) -> HostError | RefusedError:
        if exit_code == 127:
            return ApiError(
                _("There is no pvesh on {host}. Check that the host is a Proxmox VE node.").format(host=self._host)
            )
        told = _STATUS.search(said)
        status, words = (int(told[1]), told[2]) if told else (501 if _NO_SUCH_CALL.search(said) else 500, said)
        return errors.of_answer(self.who, status, words or f"exit code {exit_code}", words)
