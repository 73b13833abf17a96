"""Endpoints that read several things at once: guests with their images, a host's scan, the first page."""

from dataclasses import asdict, fields
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from images.api.shapes import AttachedSerializer, GuestSnapshotsSerializer, OverviewSerializer
from images.filters import GuestFilters, GuestsByName
from images.rewrite import attached
from images.selectors import guests_for, overview
from images.selectors.snapshots import snapshots_of
from images.serializers import GuestSerializer, SnapshotRowSerializer
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests import snapshots
from storage_admin.guests.backups import of_guests
from storage_admin.guests.models import Guest
from storage_admin.hosts.selectors import hosts_for
from storage_admin.jobs import services
from storage_admin.jobs.serializers import EmptyBody, JobSerializer
from storage_admin.rest.views import Endpoint, EndpointSet


@extend_schema_view(list=extend_schema(summary="Guests and their disks"), retrieve=extend_schema(summary="One guest"))
class GuestEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Guest.objects.none()
    serializer_class = GuestSerializer
    filterset_class = GuestFilters

    def get_queryset(self) -> QuerySet[Any]:
        return guests_for(self.actor)

    def list(self, _request: Request) -> Response:
        page: Any = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        context = {"backups": of_guests(page)}
        return self.get_paginated_response(GuestSerializer(page, many=True, context=context).data)

    @extend_schema(
        summary=_("Snapshots of a guest"),
        description="As libvirt, or Proxmox VE, lists them now, the newest first.",
        responses=GuestSnapshotsSerializer,
    )
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def snapshots(self, _request: Request, **_where: Any) -> Response:
        guest = self.get_object()
        try:
            known = snapshots.of(guest)
        except (RefusedError, HostError) as error:
            return Response({"snapshots": [], "unknown": error.detail})
        return Response({"snapshots": [asdict(one) for one in known], "unknown": None})


@extend_schema_view(list=extend_schema(summary=_("Snapshots of guests, with their age and what they hold")))
class SnapshotEndpoints(EndpointSet):
    """All of them, the oldest first, as the last scans saw them; filtered by their guests."""

    queryset = Guest.objects.none()
    serializer_class = SnapshotRowSerializer
    filterset_class = GuestsByName

    def get_queryset(self) -> QuerySet[Any]:
        return guests_for(self.actor)

    def list(self, _request: Request) -> Response:
        rows = self.paginate_queryset(snapshots_of(self.filter_queryset(self.get_queryset())))
        return self.get_paginated_response(self.get_serializer(rows, many=True).data)


class AttachedEndpoint(Endpoint):
    """``attached/``."""

    @extend_schema(
        summary=_("Images that are block devices of their hosts"),
        description="As the hosts told last. Jobs of the kinds `attach` and `detach` attach and detach (admin).",
        responses=AttachedSerializer(many=True),
        tags=["images"],
    )
    def get(self, _request: Request) -> Response:
        return Response(AttachedSerializer(attached.listed(self.actor), many=True).data)


class HostScanEndpoint(Endpoint):
    """``hosts/{id}/scan/``."""

    roles: ClassVar[dict[str, Role]] = {"post": Role.OPERATOR}

    @extend_schema(summary=_("Scan a host now"), request=EmptyBody, responses={202: JobSerializer}, tags=["hosts"])
    def post(self, request: Request, pk: int) -> Response:
        EmptyBody.of(request)
        host = get_object_or_404(hosts_for(self.actor), pk=pk)
        job = services.submit(self.actor, "scan", host.pk, {})
        return Response(JobSerializer(job).data, status=status.HTTP_202_ACCEPTED)


class OverviewEndpoint(Endpoint):
    """``overview/``."""

    @extend_schema(summary=_("Overview figures"), responses=OverviewSerializer, tags=["overview"])
    def get(self, _request: Request) -> Response:
        seen = overview(self.actor)
        # The jobs in it are rows, which are not to be copied.
        parts = {field.name: getattr(seen, field.name) for field in fields(seen)}
        return Response(OverviewSerializer(parts).data)
