"""Endpoints of jobs: submit, watch, cancel, retry, undo."""

from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts.models import Role
from storage_admin.jobs import kinds, services
from storage_admin.jobs.filters import JobFilters
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for, log_of
from storage_admin.jobs.serializers import (
    TARGETS,
    EmptyBody,
    JobBody,
    JobKindSerializer,
    JobLogSerializer,
    JobSerializer,
    PlanSerializer,
    SecretsBody,
    UndoBody,
)
from storage_admin.rest.pagination import (
    LARGEST,
    PAGE,
    JobPagination,
    LimitPagination,
    after_page,
    page_of,
    whole_number,
)
from storage_admin.rest.views import EndpointSet

AFTER = {"type": "integer", "minimum": 0, "maximum": LARGEST}


class JobKindEndpoints(EndpointSet):
    """What can be submitted."""

    queryset = Job.objects.none()
    serializer_class = JobKindSerializer
    pagination_class = LimitPagination

    @extend_schema(summary=_("Job kinds with their options"), operation_id="job_kinds_list")
    def list(self, _request: Request) -> Response:
        page: Any = self.paginate_queryset(kinds.every())
        return self.get_paginated_response(JobKindSerializer(page, many=True).data)


@extend_schema_view(list=extend_schema(summary=_("Jobs, newest first")), retrieve=extend_schema(summary=_("One job")))
class JobEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Job.objects.none()
    serializer_class = JobSerializer
    filterset_class = JobFilters
    pagination_class = JobPagination
    page_parameters: ClassVar[frozenset[str]] = frozenset({"limit", "cursor", "ordering"})
    parameters: ClassVar[dict[str, frozenset[str]]] = {"log": frozenset({"after", "limit"})}
    roles: ClassVar[dict[str, Role]] = {
        "cancel": Role.OPERATOR,
        "retry": Role.OPERATOR,
        "secrets": Role.OPERATOR,
        "undo": Role.OPERATOR,
        "discard_undo": Role.ADMIN,
    }

    def get_queryset(self) -> QuerySet[Any]:
        return jobs_for(self.actor)

    @extend_schema(
        summary=_("Submit a job, or get its plan"),
        description="With `dry_run`, the answer is 200 with the plan, even if the job would be refused. Otherwise "
                    "it is 202 with the job, or 409 with the code of the first refusal.",
        request=JobBody,
        parameters=[
            OpenApiParameter(
                "Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER,
                description=_("A request with the same key returns the job of the first one."),
            )
        ],
        responses={200: PlanSerializer, 202: JobSerializer},
    )  # fmt: skip
    def create(self, request: Request) -> Response:
        given = JobBody.of(self.request)
        kind = kinds.get(given["kind"])
        target_id = _target(kind, given)
        options = given.get("options", {})
        if given["dry_run"]:
            plan = services.plan(self.actor, kind.name, target_id, options, look=True)
            return Response(PlanSerializer(plan).data)
        job = services.submit(
            self.actor, kind.name, target_id, options, secrets=given.get("secrets", {}),
            idempotency_key=request.headers.get("Idempotency-Key", ""),
        )  # fmt: skip
        return self._accepted(job)

    @extend_schema(
        summary=_("Cancel a job. A running job reverts everything first."),
        request=EmptyBody,
        responses={202: JobSerializer},
    )
    @action(detail=True, methods=["post"])
    def cancel(self, _request: Request, **_where: Any) -> Response:
        EmptyBody.of(self.request)
        return self._accepted(services.cancel(self.actor, self.get_object()))

    @extend_schema(summary=_("Submit the same job again"), request=EmptyBody, responses={202: JobSerializer})
    @action(detail=True, methods=["post"])
    def retry(self, _request: Request, **_where: Any) -> Response:
        EmptyBody.of(self.request)
        return self._accepted(services.retry(self.actor, self.get_object()))

    @extend_schema(
        summary=_("Enter the passphrases that a job waits for"), request=SecretsBody, responses={202: JobSerializer}
    )
    @action(detail=True, methods=["post"])
    def secrets(self, _request: Request, **_where: Any) -> Response:
        job = self.get_object()
        return self._accepted(services.tell_secrets(self.actor, job, SecretsBody.of(self.request)["secrets"]))

    @extend_schema(summary=_("Undo a job: restore the original"), request=UndoBody, responses={202: JobSerializer})
    @action(detail=True, methods=["post"])
    def undo(self, _request: Request, **_where: Any) -> Response:
        force = UndoBody.of(self.request)["force"]
        return self._accepted(services.undo(self.actor, self.get_object(), force=force))

    @extend_schema(
        summary=_("Remove the undo copy of a job and free its space (admin)"),
        description=_(
            "With `force`, the copy is removed even if the image is gone or damaged, or if somebody wrote to the copy."
        ),
        request=UndoBody,
        responses={202: JobSerializer},
    )
    @action(detail=True, methods=["post"], url_path="discard-undo")
    def discard_undo(self, _request: Request, **_where: Any) -> Response:
        force = UndoBody.of(self.request)["force"]
        return self._accepted(services.discard_undo(self.actor, self.get_object(), force=force))

    @extend_schema(
        summary=_("The log of a job"),
        parameters=[
            OpenApiParameter("after", AFTER, description=_("Only lines with a larger `seq`.")),
            PAGE[0],
        ],
        responses=page_of(JobLogSerializer),
    )
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def log(self, request: Request, **_where: Any) -> Response:
        after = whole_number(request, "after", 0, 0, LARGEST)
        lines = log_of(self.get_object(), after)
        return after_page(request, lines, lambda page: JobLogSerializer(page, many=True).data)

    def _accepted(self, job: Job) -> Response:
        return Response(JobSerializer(job).data, status=status.HTTP_202_ACCEPTED)


def _target(kind: kinds.JobKind, given: dict[str, Any]) -> int:
    wrong = [name for name in TARGETS if name in given and name != kind.target]
    if wrong:
        told = gettext("{kind} jobs work on a {target}. Specify “{target}”.")
        raise ValidationError(dict.fromkeys(wrong, told.format(kind=kind.name, target=kind.target)))
    if kind.target not in given:
        told = gettext("{kind} jobs work on a {target}. Specify its id.")
        raise ValidationError({kind.target: told.format(kind=kind.name, target=kind.target)})
    return int(given[kind.target])
