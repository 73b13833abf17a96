"""``uploads/{job}/``: the bytes of a job of the kind ``upload``, in pieces, by the core of the tus protocol 1.0.0."""

import base64
import binascii
import re
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from images import uploads
from images.kinds.upload import Upload
from storage_admin.accounts.models import Role
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for
from storage_admin.rest.views import EndpointSet

#: Digests of what is sent, and of the whole file (RFC 9530).
CONTENT, WHOLE = "Content-Digest", "Repr-Digest"
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/=]{44}):")
_NUMBER = re.compile(r"[0-9]{1,19}")


class BytesParser(BaseParser):
    """Bytes as they are, which whoever wants them reads."""

    media_type = "application/octet-stream"

    def parse(self, stream: Any, *_about: Any, **_more: Any) -> Any:
        return stream


class TusParser(BytesParser):
    """The same, as tus calls them."""

    media_type = "application/offset+octet-stream"


class UploadSerializer(serializers.Serializer[Job]):
    """How far an upload is."""

    job = serializers.IntegerField(source="pk", help_text=_("Id of the job."))
    state = serializers.CharField(help_text=_("State of the job."))
    name = serializers.CharField(source="options.name")
    size = serializers.IntegerField(source="options.size", help_text=_("Size of the whole file in bytes."))
    received = serializers.SerializerMethodField(help_text=_("Bytes that are on the disk of the host; send the next."))

    def get_received(self, job: Job) -> int:
        return uploads.received(job)


class UploadEndpoints(EndpointSet):
    """Uploads that wait for bytes, or did."""

    queryset = Job.objects.none()
    serializer_class = UploadSerializer
    parser_classes = (BytesParser, TusParser)
    roles: ClassVar[dict[str, Role]] = {"partial_update": Role.OPERATOR}

    def get_queryset(self) -> QuerySet[Any]:
        return jobs_for(self.actor).filter(kind=Upload.name)

    @extend_schema(
        summary=_("How far an upload is"),
        description="The header `Upload-Offset` has what `received` has, `Upload-Length` what `size` has, as in tus.",
        operation_id="uploads_retrieve",
    )
    def retrieve(self, _request: Request, **_where: Any) -> Response:
        job = self.get_object()
        return Response(UploadSerializer(job).data, headers=_headers(uploads.received(job)) | _length(job))

    @extend_schema(
        summary=_("Send the next bytes of an upload"),
        description=f"After the tus protocol. With `{CONTENT}`, what is sent, at most 256 MiB, is compared with its "
        f"SHA-256 before any of it counts; with `{WHOLE}` beside the last bytes, the whole file as it is read back. If "
        "the connection breaks, ask how much has arrived, and continue there.",
        request={BytesParser.media_type: OpenApiTypes.BINARY},
        parameters=[
            OpenApiParameter(
                "Upload-Offset", OpenApiTypes.INT64, OpenApiParameter.HEADER, required=True,
                description=_("How many bytes of the file come before the first one that is sent."),
            ),
            OpenApiParameter(
                CONTENT, OpenApiTypes.STR, OpenApiParameter.HEADER, description=_("As `sha-256=:BASE64:` (RFC 9530).")
            ),
            OpenApiParameter(
                WHOLE, OpenApiTypes.STR, OpenApiParameter.HEADER, description=_("As `sha-256=:BASE64:` (RFC 9530).")
            ),
        ],
        responses={204: None},
        operation_id="uploads_partial_update",
    )  # fmt: skip
    def partial_update(self, request: Request, **_where: Any) -> Response:
        job = self.get_object()
        sent = {name: request.headers.get(name, "") for name in ("Upload-Offset", "Content-Length")}
        wrong = {name: _("Specify this header as a number.") for name, text in sent.items() if not _is_number(text)}
        if wrong:
            raise ValidationError(wrong)
        piece, whole = (_digest(request, name) for name in (CONTENT, WHOLE))
        offset, length = (int(text) for text in sent.values())
        stream: Any = request.data
        there = uploads.take(self.actor, job, offset, length, stream, sha256=piece, whole_sha256=whole)
        return Response(status=204, headers=_headers(there))


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) < 1 << 63


def _digest(request: Request, name: str) -> str | None:
    """A digest in hexadecimal digits, where the header has one that is known here."""
    given = request.headers.get(name)
    if given is None:
        return None
    match = _DIGEST.search(given)
    try:
        raw = base64.b64decode(match[1], validate=True) if match is not None else b""
    except binascii.Error:
        raw = b""
    if len(raw) != 32:
        raise ValidationError({name: _("Specify it as sha-256=:BASE64: (RFC 9530).")})
    return raw.hex()


def _headers(there: int) -> dict[str, str]:
    return {"Tus-Resumable": "1.0.0", "Upload-Offset": str(there), "Cache-Control": "no-store"}


def _length(job: Job) -> dict[str, str]:
    return {"Upload-Length": str(job.options["size"])}
