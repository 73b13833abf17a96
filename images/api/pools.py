"""Endpoints of pools."""

from collections.abc import Iterable
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_view
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from images.filters import PoolFilters
from images.orphans.rows import bytes_aside
from images.pool_serializers import NewPoolBody, PoolBody, PoolSerializer
from images.selectors import forecasts
from images.selectors.what_frees import Frees, what_frees
from storage_admin.accounts.models import Role
from storage_admin.events.serializers import AlertTargetSerializer
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for
from storage_admin.hosts.services import confirm_folder, register_folder, remove_pool, update_pool
from storage_admin.jobs.serializers import EmptyBody
from storage_admin.rest.views import EndpointSet


class FreesSerializer(serializers.Serializer[Any]):
    """A plan that frees space in a pool."""

    kind = serializers.CharField(help_text=_("Kind of the job."))
    target = serializers.SerializerMethodField()
    bytes = serializers.IntegerField(allow_null=True, help_text=_("Expected; null if unknown."))
    at_once = serializers.BooleanField(
        help_text=_("Whether the space is free when the job ends; else when its undo copy or the image is deleted.")
    )

    @extend_schema_field(AlertTargetSerializer())
    def get_target(self, frees: Frees) -> dict[str, Any]:
        return {"kind": frees.target_kind, "id": frees.target_id, "label": frees.label}


def shown(pools: Iterable[StoragePool], *, many: bool) -> Any:
    """Pools as the API shows them."""
    rows = list(pools)
    context = {"forecasts": forecasts(rows), "aside": bytes_aside(rows)}
    return PoolSerializer(rows if many else rows[0], many=many, context=context).data


@extend_schema_view(list=extend_schema(summary=_("Storage pools")), retrieve=extend_schema(summary=_("One pool")))
class PoolEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = StoragePool.objects.none()
    serializer_class = PoolSerializer
    filterset_class = PoolFilters
    roles: ClassVar[dict[str, Role]] = {
        "create": Role.ADMIN,
        "partial_update": Role.ADMIN,
        "destroy": Role.ADMIN,
        "confirm_folder": Role.ADMIN,
    }

    def get_queryset(self) -> QuerySet[Any]:
        return pools_for(self.actor)

    def list(self, _request: Request) -> Response:
        page: Any = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response(shown(page, many=True))

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:  # noqa: ARG002 (as the base has it)
        return Response(shown([self.get_object()], many=False))

    @extend_schema(
        summary=_("Plans that free space in a pool and on its filesystem"),
        description=_("Reclaims, undo copies, unused images, snapshots and trims; those that free most come first."),
        responses=FreesSerializer(many=True),
    )
    @action(detail=True, methods=["get"], pagination_class=None)
    def frees(self, _request: Request, **_where: Any) -> Response:
        return Response(FreesSerializer(what_frees(self.actor, self.get_object()), many=True).data)

    @extend_schema(
        summary=_("Register a folder (admin)"),
        description="The folder must exist, and must not belong to the operating system or to this dashboard. The "
        "host must list it as a folder of images; otherwise the refusal `folder_not_listed` says what "
        "root has to run there. The next scan of the host lists its images: the regular one, or `POST "
        'jobs/` with `{"kind": "scan", "host": 1}`.',
        request=NewPoolBody,
        responses={201: PoolSerializer},
    )
    def create(self, request: Request) -> Response:
        given = NewPoolBody.of(request, hosts=hosts_for(self.actor))
        pool = register_folder(
            self.actor,
            given["host"],
            given["path"],
            name=given.get("name", ""),
            add_to_list=given.get("add_to_list", False),
        )
        return Response(shown([pool], many=False), status=status.HTTP_201_CREATED)

    @extend_schema(summary="Change the settings of a pool (admin)", request=PoolBody, responses=PoolSerializer)
    def partial_update(self, request: Request, **_where: Any) -> Response:
        pool = self.get_object()
        return Response(shown([update_pool(self.actor, pool, **PoolBody.of(request))], many=False))

    @extend_schema(
        summary=_("Confirm the folder of a pool in the state `changed` (admin)"),
        description=_("The pool then uses the folder that its path leads to now."),
        request=EmptyBody,
        responses=PoolSerializer,
    )
    @action(detail=True, methods=["post"], url_path="confirm-folder")
    def confirm_folder(self, request: Request, **_where: Any) -> Response:
        EmptyBody.of(request)
        return Response(shown([confirm_folder(self.actor, self.get_object())], many=False))

    @extend_schema(summary=_("Remove a pool from the list (admin). Its files stay unchanged."), responses={204: None})
    def destroy(self, _request: Request, **_where: Any) -> Response:
        remove_pool(self.actor, self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)
