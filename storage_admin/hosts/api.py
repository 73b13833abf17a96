"""Endpoints of hosts."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.db.models import QuerySet
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts.models import Actor, Role
from storage_admin.errors import of_field
from storage_admin.hosts import key_pairs
from storage_admin.hosts.filters import HostFilters
from storage_admin.hosts.libvirt.tls import Certificates
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.registration import WantedNode, add_node, change_node
from storage_admin.hosts.registration import (
    Wanted,
    WantedLibvirt,
    add_libvirt_host,
    add_ssh_host,
    change_connection,
    remove_host,
)
from storage_admin.hosts.selectors import hosts_for
from storage_admin.hosts.serializers import HostBody, HostSerializer, NewHostBody
from storage_admin.hosts.services import update_host
from storage_admin.rest.views import EndpointSet

W = TypeVar("W", Wanted, WantedLibvirt, WantedNode)

#: What of a host's row says how it is reached.
_CERTIFICATES = ("ca_cert", "client_cert", "client_key")
_CONNECTION = (
    "address", "port", "user", "private_key", "create_key", "host_key", "token_id", "token_secret", "tls_fingerprint",
    "ssh_port", *_CERTIFICATES,
)  # fmt: skip


def _changed(host: Host, actor: Actor, given: dict[str, Any]) -> Host:
    """How it is reached, changed; fields of other kinds of hosts are left out."""
    certificates = [given.pop(name, "") for name in _CERTIFICATES]
    if host.kind == Host.Kind.PROXMOX:
        return change_node(actor, host, given)
    if any(certificates):
        given["certificates"] = Certificates(*certificates)
    return change_connection(actor, host, given)


def _with_key(
    actor: Actor, known: Host | None, given: dict[str, Any], work: Callable[[Actor, dict[str, Any]], Host]
) -> Host:
    """Adds or changes a host; ``create_key`` does so with a key pair that is created for it."""
    if not given.pop("create_key", False):
        return work(actor, given)
    kind, how = (known.kind, known.transport) if known else (given["kind"], given["transport"])
    if given.get("private_key") or kind == Host.Kind.LOCAL or (kind == Host.Kind.LIBVIRT and how != "ssh"):
        sentence = gettext("create_key requires an SSH connection and cannot be combined with private_key.")
        raise of_field("create_key", sentence)
    port = "ssh_port" if kind == Host.Kind.PROXMOX else "port"
    place: dict[str, Any] = {name: getattr(known, name, None) for name in ("address", port)} | given
    pair = key_pairs.for_place(actor, place["address"], place[port])
    is_forced = known.transport == Host.Transport.FORCED if known else given["forced"]
    is_pinned = bool(given.get("host_key") or (known and known.host_key))
    with key_pairs.used(pair, is_pinned=is_pinned, is_forced=is_forced) as private:
        return work(actor, given | {"private_key": private})


def _wanted(kind: type[W], given: dict[str, Any], **more: Any) -> W:
    """What is given of what that kind of host takes; the rest belongs to other kinds."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in names} | more)


def _by_ssh(actor: Actor, given: dict[str, Any]) -> Host:
    return add_ssh_host(actor, _wanted(Wanted, given))


def _by_libvirt(actor: Actor, given: dict[str, Any]) -> Host:
    certificates = Certificates(*(given[name] for name in _CERTIFICATES))
    by_ssh = given["transport"] == "ssh"
    return add_libvirt_host(
        actor, _wanted(WantedLibvirt, given, by_ssh=by_ssh, forced=False, certificates=certificates)
    )


def _by_proxmox(actor: Actor, given: dict[str, Any]) -> Host:
    return add_node(actor, _wanted(WantedNode, given, by_ssh=bool(given["host_key"] or given["private_key"])))


_ADD: dict[str, Callable[[Actor, dict[str, Any]], Host]] = {
    "ssh": _by_ssh, "libvirt": _by_libvirt, "proxmox": _by_proxmox,
}  # fmt: skip


@extend_schema_view(list=extend_schema(summary=_("Hosts")), retrieve=extend_schema(summary=_("One host")))
class HostEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Host.objects.none()
    serializer_class = HostSerializer
    filterset_class = HostFilters
    roles: ClassVar[dict[str, Role]] = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}

    def get_queryset(self) -> QuerySet[Any]:
        return hosts_for(self.actor)

    @extend_schema(
        summary=_("Add a remote host (admin)"),
        description=_(
            "Tests the connection before saving. With kind `ssh`, this installs the agent, unless `forced` is set, "
            "and checks that it runs as root."
        ),
        request=NewHostBody,
        responses={201: HostSerializer},
    )
    def create(self, request: Request) -> Response:
        given = NewHostBody.of(request)
        host = _with_key(self.actor, None, given, _ADD[given["kind"]])
        return Response(HostSerializer(host).data, status=status.HTTP_201_CREATED)

    @extend_schema(
        summary=_("Change a host's name, limits or connection (admin)"),
        description=_("Changing the connection requires access to all hosts."),
        request=HostBody,
        responses=HostSerializer,
    )
    def partial_update(self, request: Request, **_where: Any) -> Response:
        host = self.get_object()
        given = HostBody.of(request)
        connection = {name: given.pop(name) for name in _CONNECTION if name in given}
        if connection:
            host = _with_key(self.actor, host, connection, partial(_changed, host))
        if given:
            host = update_host(self.actor, host, **given)
        return Response(HostSerializer(host).data)

    @extend_schema(summary=_("Remove a host; nothing on it is changed (admin)"), responses={204: None})
    def destroy(self, _request: Request, **_where: Any) -> Response:
        remove_host(self.actor, self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)
