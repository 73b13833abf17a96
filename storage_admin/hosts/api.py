"""Endpoints of hosts."""

from typing import Any, ClassVar

import django_filters
from django.db.models import Q, QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts.roles import Role
from storage_admin.api.views import EndpointSet
from storage_admin.hosts.models import Host
from storage_admin.hosts.selectors import hosts_for
from storage_admin.hosts.serializers import HostBody, HostSerializer
from storage_admin.hosts.services import update_host

_ONE_HOST = "Only this machine is managed so far: further hosts cannot be added or removed yet."


class HostFilters(django_filters.FilterSet):  # type: ignore[misc]  # an untyped library
    kind = django_filters.ChoiceFilter(choices=Host.Kind.choices)
    status = django_filters.ChoiceFilter(choices=Host.Status.choices)
    search = django_filters.CharFilter(method="by_text", max_length=200, label="Part of the name or slug.")
    ordering = django_filters.OrderingFilter(fields=("name", "slug", "status", "last_seen", "id"))

    def by_text(self, rows: QuerySet[Host], _name: str, value: str) -> QuerySet[Host]:
        return rows.filter(Q(name__icontains=value) | Q(slug__icontains=value))


@extend_schema_view(list=extend_schema(summary="Hosts"), retrieve=extend_schema(summary="One host"))
class HostEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Host.objects.none()
    serializer_class = HostSerializer
    filterset_class = HostFilters
    roles: ClassVar[dict[str, Role]] = {"partial_update": Role.ADMIN}
    not_allowed: ClassVar[dict[str, str]] = {"POST": _ONE_HOST, "DELETE": _ONE_HOST}

    def get_queryset(self) -> QuerySet[Any]:
        return hosts_for(self.actor)

    @extend_schema(summary="Change a host's name or limits (admin)", request=HostBody, responses=HostSerializer)
    def partial_update(self, request: Request, **_where: Any) -> Response:
        host = self.get_object()
        body = HostBody(data=request.data)
        body.is_valid(raise_exception=True)
        host = update_host(self.actor, host, **body.validated_data)
        return Response(HostSerializer(host).data)
