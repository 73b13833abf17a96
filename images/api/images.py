"""Endpoints of images."""

from dataclasses import asdict
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http.response import HttpResponseBase
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from images import backups, download, files
from images.api.shapes import (
    BackingCandidateSerializer,
    ChainSerializer,
    FilesSerializer,
    OneImageSerializer,
    SampleSerializer,
)
from images.filters import ImageFilters
from images.kinds.relink import candidates, is_lost
from images.models import Image
from images.scan import vanished
from images.selectors import MatchingImages, chain_of, history_of, images_for
from images.serializers import ImageBody, ImageSerializer, SetAsideBody
from images.services import declare_format
from storage_admin.accounts.models import Role
from storage_admin.jobs import services
from storage_admin.jobs.serializers import EmptyBody, JobSerializer
from storage_admin.rest.pagination import PAGE, page_of
from storage_admin.rest.schema import ASKS_HOST
from storage_admin.rest.views import EndpointSet


@extend_schema_view(
    list=extend_schema(summary=_("Images, including those that have vanished (see `state`)")),
    retrieve=extend_schema(summary=_("One image"), responses=OneImageSerializer),
)
class ImageEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Image.objects.none()
    serializer_class = ImageSerializer
    filterset_class = ImageFilters
    roles: ClassVar[dict[str, Role]] = {
        "partial_update": Role.ADMIN,
        "destroy": Role.ADMIN,
        "set_aside": Role.ADMIN,
        "restore": Role.ADMIN,
        "content": Role.ADMIN,
        "files": Role.ADMIN,
        "file_content": Role.ADMIN,
    }
    parameters: ClassVar[dict[str, frozenset[str]]] = {
        "history": frozenset({"limit", "offset"}),
        "files": frozenset({"device", "path"}),
        "file_content": frozenset({"device", "path"}),
    }

    def get_queryset(self) -> QuerySet[Any]:
        rows = images_for(self.actor)
        return rows if self.action == "list" else rows.defer(None)  # one image's estimate tells of its snapshots

    def get_serializer_class(self) -> Any:
        return OneImageSerializer if self.action == "retrieve" else super().get_serializer_class()

    def list(self, _request: Request) -> Response:
        page: Any = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        backups.read(page)
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    def listed(self, rows: QuerySet[Any]) -> Any:
        """What is cut into pages; samples of a history are few enough to be read directly."""
        return MatchingImages(rows) if rows.model is Image else rows

    @extend_schema(summary=_("Declare the format of an image (admin)"), request=ImageBody, responses=ImageSerializer)
    def partial_update(self, request: Request, **_where: Any) -> Response:
        image = self.get_object()
        given = ImageBody.of(request)
        if "declared_format" in given:
            declare_format(self.actor, image, given["declared_format"] or "")
        return Response(ImageSerializer(self.get_object()).data)

    @extend_schema(
        summary=_("Remove a vanished or deleted image from the list (admin)"),
        responses={204: None},
    )
    def destroy(self, _request: Request, **_where: Any) -> Response:
        vanished.forget(self.actor, self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(summary=_("The whole backing chain tree that the image is part of"), responses=ChainSerializer)
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def chain(self, _request: Request, **_where: Any) -> Response:
        chain = chain_of(self.get_object(), self.actor)
        edges = [{"from": edge.overlay, "to": edge.base} for edge in chain.edges]
        return Response({**asdict(chain), "edges": edges})

    @extend_schema(
        summary=_("Images that may be the missing backing file of the image, the likeliest first"),
        responses=BackingCandidateSerializer(many=True),
    )
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def candidates(self, _request: Request, **_where: Any) -> Response:
        image = self.get_object()
        found = candidates(image) if is_lost(image) else []
        return Response(BackingCandidateSerializer(found, many=True).data)

    @extend_schema(
        summary=_("Set an orphan aside (admin)"),
        description="Submits a job of the kind `set_aside`: the image is renamed, so that guests and lists no "
        "longer find it. No space is freed. After `grace_days` an admin may delete it with a job of "
        "the kind `delete_aside`.",
        request=SetAsideBody,
        responses={202: JobSerializer},
    )
    @action(detail=True, methods=["post"], url_path="set-aside", filter_backends=[])
    def set_aside(self, request: Request, **_where: Any) -> Response:
        return self._submitted("set_aside", SetAsideBody.of(request))

    @extend_schema(
        summary=_("Restore an image that is set aside"),
        request=EmptyBody,
        responses={202: JobSerializer},
    )
    @action(detail=True, methods=["post"], filter_backends=[])
    def restore(self, request: Request, **_where: Any) -> Response:
        EmptyBody.of(request)
        return self._submitted("restore_aside", {})

    @extend_schema(
        summary=_("The image's file, whole or a range of it (admin)"),
        description="The bytes of the file as it is, without its backing files, while nobody uses it. `Range` and "
        "`If-Range` with the `ETag` of before let a download go on that broke off. The audit trail has the SHA-256 of "
        "what was sent. Where the file changes meanwhile, the answer ends before its `Content-Length`.",
        responses={(200, "application/octet-stream"): OpenApiTypes.BINARY},
    )
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def content(self, request: Request, **_where: Any) -> HttpResponseBase:
        asked, since = request.headers.get("Range", ""), request.headers.get("If-Range", "")
        body = request.method != "HEAD"
        return download.answer(self.actor, self.get_object(), wanted=asked, unless_changed=since, body=body)

    @extend_schema(
        summary=_("Filesystems and operating systems on the image, or what is in a folder (admin)"),
        description="Without parameters, the filesystems and operating systems are listed; with `device` and `path`, "
        "the entries of a folder. A small virtual machine starts for each request, which takes seconds, on hosts "
        "without KVM ten and more. An admin has to allow it for the pool (`look_inside`). Each path is in the trail.",
        parameters=[
            OpenApiParameter("device", OpenApiTypes.STR, description=_("As named by the answer without parameters.")),
            OpenApiParameter("path", OpenApiTypes.STR, description=_("Full path on that filesystem.")),
        ],
        responses=FilesSerializer,
        extensions={ASKS_HOST: True},
    )
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def files(self, request: Request, **_where: Any) -> Response:
        device, path = request.query_params.get("device"), request.query_params.get("path")
        if device:
            told = files.listing(self.actor, self.get_object(), device, path or "/")
        else:
            told = files.look(self.actor, self.get_object())
        return Response(FilesSerializer(told).data)

    @extend_schema(
        summary=_("A file of the guest (admin)"),
        parameters=[
            OpenApiParameter(
                "device", OpenApiTypes.STR, required=True, description=_("A `device` that `files` lists.")
            ),
            OpenApiParameter("path", OpenApiTypes.STR, required=True, description=_("Full path on that filesystem.")),
        ],
        responses={(200, "application/octet-stream"): OpenApiTypes.BINARY},
    )
    @action(
        detail=True, methods=["get"], filter_backends=[], pagination_class=None, url_path="files/content",
        url_name="file-content",
    )  # fmt: skip
    def file_content(self, request: Request, **_where: Any) -> HttpResponseBase:
        given = {name: request.query_params.get(name, "") for name in ("device", "path")}
        image = self.get_object()
        if missing := {name: gettext("Required.") for name, value in given.items() if not value}:
            raise ValidationError(missing)
        return files.content(self.actor, image, given["device"], given["path"])

    def _submitted(self, kind: str, options: dict[str, Any]) -> Response:
        job = services.submit(self.actor, kind, self.get_object().pk, options)
        return Response(JobSerializer(job).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(
        summary=_("The sizes of the image over time, oldest first"),
        parameters=PAGE,
        responses=page_of(SampleSerializer),
    )
    @action(detail=True, methods=["get"], filter_backends=[])
    def history(self, _request: Request, **_where: Any) -> Response:
        page: Any = self.paginate_queryset(history_of(self.get_object()))
        return self.get_paginated_response(SampleSerializer(page, many=True).data)
