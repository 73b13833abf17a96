"""A host is added, or reached otherwise: how, what it shows compared, then saved. Works without a script."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError, UnconfirmedError
from storage_admin.hosts import forced, key_pairs, registration
from storage_admin.hosts.libvirt.tls import Certificates
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import registration as proxmox_hosts
from storage_admin.hosts.proxmox.registration import Offer, WantedNode
from storage_admin.hosts.registration import DEFAULT_PORT
from storage_admin.hosts.transport import FOLDER
from storage_admin.jobs.services import submit
from storage_admin.web.forms import Wrong
from storage_admin.web.page import PageRequest, attempt, page, wants_fragment
from storage_admin.web.pages import host_forms
from storage_admin.web.pages.host_forms import WAYS, Typed, Way

#: The boxes of the form: what the page calls them, and what they send.
_TICKED = {"is_forced": "forced", "new_key": "new_key", "by_ssh": "by_ssh"}
_secret = sensitive_post_parameters("private_key", "token_secret", "client_key")


@dataclass
class NodeRow:
    """A node of a cluster on the page: whether it is chosen, and what its SSH server showed."""

    offer: Offer
    chosen: bool
    address: str
    error: str = ""
    shown: dict[str, str] = field(default_factory=dict)
    host_key: str = ""


class ChooseError(Exception):
    """There are nodes to choose from, or to look at once more."""

    def __init__(self, nodes: list[NodeRow], *, is_wrong: bool) -> None:
        super().__init__(_("choose the nodes"))
        self.nodes = nodes
        self.is_wrong = is_wrong


@_secret
@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN, everywhere=True)
def host_add(request: PageRequest) -> HttpResponseBase:
    """The form of one way; POST tries the connection, shows what is to be compared, and saves what was confirmed."""
    given = request.POST if request.method == "POST" else request.GET
    way = WAYS.get(given.get("kind", ""), WAYS["ssh"])
    if request.method != "POST":
        host_forms.forget(request.session)
        template = "hosts/add.html#form" if wants_fragment(request) else "hosts/add.html"
        return render(request, template, _context(way, {}, creates_key=True))
    return _attempted(request, way, lambda typed: _ADD[way.name](request, typed), _saved)


@_secret
@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN, everywhere=True)
def host_connection(request: PageRequest, host_id: int) -> HttpResponseBase:
    """How a host is reached, to change; a secret that is left empty stays."""
    host = Host.objects.filter(pk=host_id).first()
    way = host_forms.way_of(host) if host is not None else None
    if host is None or way is None:
        raise NotFoundError(_("There is no remote host {host}.").format(host=host_id))
    if request.method != "POST":
        host_forms.forget(request.session)
        how = host.transport
        now = {"is_forced": how == "forced", "by_ssh": how == "api+ssh", "creates_key": how == "api"}
        return render(request, "hosts/add.html", _context(way, host_forms.given_of(host), known=host, **now))
    before = host.name

    def changed(typed: Typed) -> list[Host]:
        return [_change(request, host, way, typed)]

    def saved(request: PageRequest, _hosts: list[Host]) -> None:
        messages.success(request, _("Connection of {before} saved; a scan is queued.").format(before=before))

    return _attempted(request, way, changed, saved, known=host)


def _attempted(
    request: PageRequest,
    way: Way,
    work: Callable[[Typed], list[Host]],
    saved: Callable[[PageRequest, list[Host]], None],
    known: Host | None = None,
) -> HttpResponseBase:
    typed = Typed(way, request.POST, request.session)
    if "tls_fingerprint" in typed.values:
        # What was compared is what it is pinned to from then on, unless somebody typed another: that one is the truth.
        typed.values["tls_fingerprint"] = typed.values["tls_fingerprint"].strip() or request.POST.get(
            "shown_fingerprint", ""
        )
    more: dict[str, Any] = {
        **{shown: name in request.POST for shown, name in _TICKED.items()}, "known": known,
        "creates_key": request.POST.get("key") == "create",
    }  # fmt: skip
    status = 200
    try:
        with _key_pair(request, way, typed, known, more) as given:
            hosts = work(given)
    except UnconfirmedError as error:
        more["shown"] = error.shown | {"detail": error.detail}
    except ChooseError as error:
        more["nodes"], status = error.nodes, 400 if error.is_wrong else 200
        if error.is_wrong and not any(row.chosen for row in error.nodes):
            more["error"] = Wrong(_("Select at least one node."), {})
    except InvalidError as error:
        more["error"], status = Wrong(error.detail, error.fields), 400
    except RefusedError as error:
        more["error"], status = Wrong(error.detail, {}), 409
    else:
        host_forms.forget(request.session)
        saved(request, hosts)
        for host in hosts:
            attempt(request, lambda host=host: submit(request.actor, "scan", host.pk, {}))  # type: ignore[misc]
        return redirect("hosts")
    more["draft"], more["held"] = typed.keep(), typed.held()
    # What was confirmed at an earlier step is sent along.
    more["host_key"] = _confirmed_key(request)
    answer = render(request, "hosts/add.html", _context(way, typed.shown(), **more), status=status)
    answer["Cache-Control"] = "no-store"
    return answer


@contextmanager
def _key_pair(
    request: PageRequest, way: Way, typed: Typed, known: Host | None, more: dict[str, Any]
) -> Iterator[Typed]:
    """What was typed, with the key pair that is created for it where that was chosen. The page shows its public key."""
    if not typed.creates_key:
        yield typed
        return
    values = typed.values
    port = values["ssh_port" if way.name == "proxmox" else "port"].strip()
    pair = key_pairs.for_place(request.actor, values["address"], port)
    is_pinned = bool(_confirmed_key(request) or (known and known.host_key and "new_key" not in request.POST))
    if pair is not None:
        user = values["user"].strip() or "root"
        as_user = "" if user == "root" else f" --user {shlex.quote(user)}"
        login = shlex.join(
            ["ssh", *(["-p", str(pair.port)] if pair.port != DEFAULT_PORT else []), f"root@{pair.address}"]
        )
        line = forced.named(pair.public_key)
        more["pair"] = {
            "line": line, "forced_line": forced.authorized_line(pair.public_key), "user": user,
            "until": pair.created + key_pairs.LASTS,
            "installer": f"manage.py agent_installer --key {shlex.quote(line)}{as_user} | {login} sh",
            "sudo": f"manage.py agent_installer{as_user} | {login} sh" if as_user else "",
        }  # fmt: skip
    with key_pairs.used(pair, is_pinned=is_pinned) as private:
        yield typed.with_key(private)


def _confirmed_key(request: PageRequest) -> str:
    """The host's key that was compared at an earlier step; nothing where the address was changed since."""
    of = request.POST.get("host_key_of")
    same = of is None or of.strip() == request.POST.get("address", "").strip()
    return request.POST.get("host_key", "") if same else ""


def _saved(request: PageRequest, hosts: list[Host]) -> None:
    added = ngettext("{names} is added; a scan is queued.", "{names} are added; a scan is queued.", len(hosts))
    messages.success(request, added.format(names=", ".join(host.name for host in hosts)))


def _context(way: Way, given: dict[str, str], **more: Any) -> dict[str, Any]:
    known: Host | None = more.get("known")

    def shown(fields: tuple[host_forms.Field, ...]) -> list[dict[str, Any]]:
        return [
            {
                "field": one, "value": given.get(one.name, ""),
                "required": one.required and known is None and not (one.is_secret and one.name in more.get("held", ())),
                "held": one.name in more.get("held", ()),
            }
            for one in fields
            if known is None or one.name != "name"
        ]  # fmt: skip

    return more | {
        "section": "hosts", "ways": WAYS.values(), "way": way, "fields": shown(way.fields),
        "ssh_fields": shown(way.ssh_fields), "address": given.get("address", ""), "folder": FOLDER,
        "action": reverse("host_connection", args=[known.pk]) if known is not None else reverse("host_add"),
    }  # fmt: skip


def _by_ssh(request: PageRequest, typed: Typed) -> list[Host]:
    values = typed.values
    wanted = registration.Wanted(
        name=values["name"], address=values["address"], port=values["port"].strip(),
        user=values["user"].strip() or "root", private_key=values["private_key"],
        host_key=_confirmed_key(request), forced="forced" in request.POST,
    )  # fmt: skip
    return [registration.add_ssh_host(request.actor, wanted)]


def _libvirt_by_ssh(request: PageRequest, typed: Typed) -> list[Host]:
    values = typed.values
    wanted = registration.WantedLibvirt(
        values["name"], values["address"], values["port"].strip(), by_ssh=True, user=values["user"].strip() or "root",
        private_key=values["private_key"], host_key=_confirmed_key(request),
    )  # fmt: skip
    return [registration.add_libvirt_host(request.actor, wanted)]


def _libvirt_by_tls(request: PageRequest, typed: Typed) -> list[Host]:
    values = typed.values
    wanted = registration.WantedLibvirt(
        values["name"], values["address"], values["port"].strip(), certificates=_certificates(values)
    )
    return [registration.add_libvirt_host(request.actor, wanted)]


def _certificates(values: dict[str, str]) -> Certificates:
    return Certificates(values["ca_cert"], values["client_cert"], values["client_key"])


def _nodes(request: PageRequest, typed: Typed) -> list[Host]:
    """The chosen nodes of a cluster. All are tried before one is saved."""
    wanted = _wanted_node(request, typed)
    offers = proxmox_hosts.offers(request.actor, wanted)
    if len(offers) == 1:
        name = wanted.name.strip() or offers[0].node
        return [proxmox_hosts.add_node(request.actor, replace(wanted, name=name, node=offers[0].node))]
    asked = "choosing" in request.POST
    rows = [_row(request, offer, asked=asked) for offer in offers]
    chosen = [row for row in rows if row.chosen]
    if not asked or not chosen:
        raise ChooseError(rows, is_wrong=asked)
    hosts = [_tried(request.actor, replace(_at(wanted, row), name=row.offer.node), row) for row in chosen]
    if any(host is None for host in hosts):
        raise ChooseError(rows, is_wrong=any(row.error for row in rows))
    return [registration.save(request.actor, host) for host in hosts if host is not None]


def _row(request: PageRequest, offer: Offer, *, asked: bool) -> NodeRow:
    chosen = offer.node in request.POST.getlist("node") if asked else offer.online is not False
    address = request.POST.get(f"address-{offer.node}", "").strip() or offer.address
    key = request.POST.get(f"host_key-{offer.node}", "")
    return NodeRow(offer, chosen and not offer.registered_as, address, host_key=key)


def _at(wanted: WantedNode, row: NodeRow) -> WantedNode:
    """A node at its own address, with the certificate that belongs there."""
    is_typed = row.address == wanted.address.strip()
    fingerprint = wanted.tls_fingerprint if is_typed else row.offer.tls_fingerprint
    return replace(wanted, node=row.offer.node, address=row.address, tls_fingerprint=fingerprint, host_key=row.host_key)


def _tried(actor: Actor, wanted: WantedNode, row: NodeRow) -> Host | None:
    try:
        return proxmox_hosts.tried(actor, wanted)
    except UnconfirmedError as error:
        if "host_key" in error.shown:
            row.shown, row.host_key = error.shown | {"detail": error.detail}, error.shown["host_key"]
        else:
            row.error = error.detail
    except (InvalidError, RefusedError) as error:
        row.error = error.detail
    return None


def _wanted_node(request: PageRequest, typed: Typed) -> WantedNode:
    values = typed.values
    return WantedNode(
        name=values["name"], address=values["address"].strip(), port=values["port"].strip(),
        token_id=values["token_id"], token_secret=values["token_secret"],
        tls_fingerprint=values["tls_fingerprint"],
        ssh_port=values["ssh_port"].strip(), user=values["user"].strip() or "root", private_key=values["private_key"],
        host_key=_confirmed_key(request), by_ssh="by_ssh" in request.POST,
    )  # fmt: skip


def _change(request: PageRequest, host: Host, way: Way, typed: Typed) -> Host:
    values = {name: text.strip() for name, text in typed.values.items() if name != "name"}
    for one in way.all_fields:
        if one.is_secret and not values.get(one.name):
            values.pop(one.name, None)
    given: dict[str, Any] = dict(values)
    is_there = (values.get("address"), values.get("ssh_port", values.get("port"))) == (
        host.address, str((host.ssh_port if way.name == "proxmox" else host.port) or ""),
    )  # fmt: skip
    # The key that was confirmed once still holds, unless the host is to be found elsewhere.
    given["host_key"] = _confirmed_key(request) or (host.host_key if is_there and "new_key" not in request.POST else "")
    if way.name == "proxmox":
        if "by_ssh" not in request.POST:
            given |= {"host_key": "", "private_key": ""}
        given["by_ssh"] = "by_ssh" in request.POST
        return proxmox_hosts.change_node(request.actor, host, given)
    if way.name == "libvirt-tls":
        own = _certificates(typed.values)
        given = {"address": given["address"], "port": given["port"]} | ({"certificates": own} if own.given else {})
    elif way.name == "ssh":
        given["forced"] = "forced" in request.POST
    return registration.change_connection(request.actor, host, given)


_ADD: dict[str, Callable[[PageRequest, Typed], list[Host]]] = {
    "ssh": _by_ssh, "proxmox": _nodes, "libvirt-tls": _libvirt_by_tls, "libvirt-ssh": _libvirt_by_ssh,
}  # fmt: skip
