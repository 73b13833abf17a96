"""A host is added: how it is reached, its key compared, then saved."""

from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from images.views.access import PageRequest, attempt, page
from storage_admin.accounts.roles import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.errors import InvalidError, UnconfirmedError
from storage_admin.hosts.registration import Wanted, add_ssh_host
from storage_admin.hosts.transport import FOLDER
from storage_admin.jobs.services import submit

#: Name, word, example, hint, whether it has to be given.
FIELDS = (
    ("name", "Name", "hv1", "How it is called here.", True),
    ("address", "Address", "hv1.example.org", "Its name, or its IPv4 or IPv6 address.", True),
    ("port", "Port", "22", "Of its SSH server.", False),
    ("user", "User", "root", "Another one than root needs sudo without a password there.", False),
    ("private_key", "Private key", "", "", False),
)


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def host_add(request: PageRequest) -> HttpResponseBase:
    """The form; POST tries the connection, shows the host's key, and saves the host once that is confirmed."""
    if request.method != "POST":
        return render(request, "hosts/add.html", _context({}, {}))
    given = {name: request.POST.get(name, "") for name, *_ in FIELDS}
    wanted = Wanted(
        name=given["name"], address=given["address"], port=given["port"].strip(), user=given["user"].strip() or "root",
        private_key=given["private_key"], host_key=request.POST.get("host_key", ""), forced="forced" in request.POST,
    )  # fmt: skip
    more: dict[str, Any] = {"is_forced": wanted.forced}
    try:
        host = add_ssh_host(request.actor, wanted)
    except UnconfirmedError as error:
        more["shown"] = error.shown | {"detail": error.detail}
        return render(request, "hosts/add.html", _context(given, {}) | more)
    except InvalidError as error:
        return render(request, "hosts/add.html", _context(given, error.fields) | more, status=400)
    except RefusedError as error:
        more["error"] = error.detail
        return render(request, "hosts/add.html", _context(given, {}) | more, status=409)
    messages.success(request, f"{host.name} is added; a scan of it is queued.")
    attempt(request, lambda: submit(request.actor, "scan", host.pk, {}))
    return redirect("hosts")


def _context(given: dict[str, str], errors: dict[str, str]) -> dict[str, Any]:
    fields = {
        name: {
            "word": word, "example": example, "hint": hint, "required": required,
            "value": given.get(name, ""), "error": errors.get(name, ""),
        }
        for name, word, example, hint, required in FIELDS
    }  # fmt: skip
    other = " ".join(text for name, text in errors.items() if name not in fields)
    return {"section": "hosts", "fields": fields, "error": other, "folder": FOLDER}
