"""Endpoints of policies, their runs, and the switch for all automation."""

from collections.abc import Sequence
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from images.api.policy_shapes import (
    AutomationBody,
    AutomationSerializer,
    PickSerializer,
    PolicyBody,
    PolicyPatch,
    PolicySerializer,
    PreviewSerializer,
    RunSerializer,
    preview_of,
)
from images.models import Policy, PolicyPick, PolicyRun
from images.policies import selectors, services
from images.policies.preview import CODES, preview
from images.policies.reasons import NOT_MEANT
from images.policies.scope import hosts_of, policies_for, require_reach
from images.policies.shape import Rules
from images.policies.validation import clean
from storage_admin.accounts.models import Actor, Role
from storage_admin.jobs import automation
from storage_admin.jobs.serializers import EmptyBody
from storage_admin.rest.pagination import DEFAULT_LIMIT, LARGEST, MAX_LIMIT, PAGE, page_of, whole_number
from storage_admin.rest.views import Endpoint, EndpointSet

_CODE = OpenApiParameter("code", OpenApiTypes.STR, description=_("Only images skipped for this reason."))
_REASON = OpenApiParameter(
    "code", OpenApiTypes.STR, enum=sorted(CODES),
    description="List in `skipped` only those with this reason. Images outside the scope of the policy "
                f"(`{'`, `'.join(NOT_MEANT)}`) are listed only if their reason is given here.",
)  # fmt: skip
_STATE = OpenApiParameter("state", OpenApiTypes.STR, enum=PolicyPick.State.values)
_PAGE_NAMES = frozenset({"limit", "offset"})


@extend_schema_view(list=extend_schema(summary=_("Policies")), retrieve=extend_schema(summary=_("One policy")))
class PolicyEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Policy.objects.none()
    serializer_class = PolicySerializer
    roles: ClassVar[dict[str, Role]] = {
        "create": Role.ADMIN,
        "partial_update": Role.ADMIN,
        "destroy": Role.ADMIN,
        "run": Role.OPERATOR,
        "stop": Role.OPERATOR,
        "preview": Role.OPERATOR,
        "draft": Role.OPERATOR,
    }
    parameters: ClassVar[dict[str, frozenset[str]]] = {
        "preview": _PAGE_NAMES | {"code"},
        "draft": _PAGE_NAMES | {"code"},
        "runs": _PAGE_NAMES,
        "picks": _PAGE_NAMES | {"state", "code"},
    }

    def get_queryset(self) -> QuerySet[Any]:
        return policies_for(self.actor)

    def list(self, _request: Request) -> Response:
        page: Any = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response(_policies(self.actor, page))

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:  # noqa: ARG002 (as the base has it)
        return Response(_policies(self.actor, [self.get_object()])[0])

    @extend_schema(summary=_("Create a policy (admin)"), request=PolicyBody, responses={201: PolicySerializer})
    def create(self, request: Request) -> Response:
        policy = services.create(self.actor, PolicyBody.of(request))
        return Response(_policies(self.actor, [policy])[0], status=status.HTTP_201_CREATED)

    @extend_schema(
        summary=_("Change a policy (admin)"),
        description="A run that is in progress continues unchanged, but disabling the policy stops it. If cron or "
        "time zone change, windows that would have opened in the past are not made up for.",
        request=PolicyPatch,
        responses=PolicySerializer,
    )
    def partial_update(self, request: Request, **_where: Any) -> Response:
        policy = self.get_object()
        return Response(_policies(self.actor, [services.change(self.actor, policy, PolicyPatch.of(request))])[0])

    @extend_schema(
        summary=_("Delete a policy and its history (admin)"),
        description=_("Jobs that are running continue to their end."),
        responses={204: None},
    )
    def destroy(self, _request: Request, **_where: Any) -> Response:
        services.remove(self.actor, self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        summary=_("Preview a policy (operator)"),
        description="Nothing is written. `limit` and `offset` apply to both lists: `chosen` is ordered by expected "
        "savings, `skipped` by name. Entries of this page of `chosen` whose plans are refused come "
        "first in `skipped`.",
        parameters=[*PAGE, _REASON],
        responses=PreviewSerializer,
    )
    @action(detail=True, methods=["get"], filter_backends=[], pagination_class=None)
    def preview(self, request: Request, **_where: Any) -> Response:
        return self._preview(request, self.get_object())

    @extend_schema(
        summary=_("Preview a policy that is not created yet (operator)"),
        description=_("Nothing is written."),
        request=PolicyBody,
        parameters=[*PAGE, _REASON],
        responses=PreviewSerializer,
        operation_id="policies_preview_draft",
    )
    @action(detail=False, methods=["post"], url_path="preview", filter_backends=[], pagination_class=None)
    def draft(self, request: Request) -> Response:
        draft = clean(Policy(**PolicyBody.of(request)), self.actor)
        require_reach(self.actor, draft, Role.OPERATOR)
        return self._preview(request, draft)

    @extend_schema(summary=_("Run a policy now (operator)"), request=EmptyBody, responses={202: RunSerializer})
    @action(detail=True, methods=["post"], filter_backends=[])
    def run(self, request: Request, **_where: Any) -> Response:
        EmptyBody.of(request)
        run = services.run_now(self.actor, self.get_object())
        return Response(_runs(self.actor, [run])[0], status=status.HTTP_202_ACCEPTED)

    @extend_schema(
        summary=_("Runs of the policy, newest first, with their jobs and the number skipped by each rule"),
        parameters=PAGE,
        responses=page_of(RunSerializer),
    )
    @action(detail=True, methods=["get"], filter_backends=[])
    def runs(self, _request: Request, **_where: Any) -> Response:
        page: Any = self.paginate_queryset(selectors.runs_of(self.actor, self.get_object()))
        return self.get_paginated_response(_runs(self.actor, page))

    @extend_schema(
        summary=_("What a run considered, each with its job or with the reason why it was skipped"),
        parameters=[*PAGE, _STATE, _CODE],
        responses=page_of(PickSerializer),
        operation_id="policies_runs_picks_list",
    )
    @action(detail=True, methods=["get"], url_path="runs/<int:run>/picks", filter_backends=[])
    def picks(self, request: Request, run: int, **_where: Any) -> Response:
        found = self._run(run)
        given = {name: request.query_params.get(name, "") for name in ("state", "code")}
        if given["state"] and given["state"] not in PolicyPick.State.values:
            raise ValidationError(
                {"state": gettext("One of {values}.").format(values=", ".join(PolicyPick.State.values))}
            )
        if not given["code"].isprintable():  # PostgreSQL takes no NUL
            raise ValidationError({"code": gettext("This code does not exist.")})
        page: Any = self.paginate_queryset(selectors.picks_of(found, state=given["state"], code=given["code"]))
        return self.get_paginated_response(PickSerializer(page, many=True).data)

    @extend_schema(
        summary=_("Stop a run (operator)"),
        description="No further job starts in the run, and queued jobs are withdrawn. Running jobs continue to "
        "their end; until then `finished` is null. A run that has ended is refused with `ended`.",
        request=EmptyBody,
        responses=RunSerializer,
        operation_id="policies_runs_stop",
    )
    @action(detail=True, methods=["post"], url_path="runs/<int:run>/stop", filter_backends=[])
    def stop(self, request: Request, run: int, **_where: Any) -> Response:
        found = self._run(run)
        EmptyBody.of(request)
        return Response(_runs(self.actor, [services.stop(self.actor, found)])[0])

    def _run(self, run_id: int) -> PolicyRun:
        found = selectors.runs_of(self.actor, self.get_object()).filter(pk=run_id).first()
        if found is None:
            raise NotFound
        return found

    def _preview(self, request: Request, policy: Policy) -> Response:
        limit = whole_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        offset = whole_number(request, "offset", 0, 0, LARGEST - MAX_LIMIT)
        code = request.query_params.get("code", "")
        if code and code not in CODES:
            raise ValidationError(
                {"code": gettext("This code does not exist. See docs/policies.md and docs/refusals.md for the list.")}
            )
        found = preview(
            Rules.of(policy), timezone.now(), limit=limit, chosen_from=offset, skipped_from=offset, code=code,
            hosts=hosts_of(self.actor),
        )  # fmt: skip
        return Response(PreviewSerializer(preview_of(found, Rules.of(policy).target_kind)).data)


def _policies(actor: Actor, policies: Sequence[Policy]) -> Any:
    last = selectors.last_runs(actor, policies)
    context = {"now": timezone.now(), "last": last, "sums": selectors.sums_of(last.values())}
    return PolicySerializer(policies, many=True, context=context).data


def _runs(actor: Actor, runs: list[PolicyRun]) -> Any:
    skips = selectors.skips_of(runs, limited=actor.hosts is not None)
    context = {"sums": selectors.sums_of(runs), "picks": selectors.jobs_of(runs), "skips": skips}
    return RunSerializer(runs, many=True, context=context).data


class AutomationEndpoint(Endpoint):
    """``automation/``."""

    roles: ClassVar[dict[str, Role]] = {"patch": Role.ADMIN}

    @extend_schema(
        summary=_("Whether automation is paused"),
        description="While automation is paused, no policy and no scheduled benchmark starts, and undo copies do "
        "not expire. Scans continue.",
        responses=AutomationSerializer,
        tags=["automation"],
    )
    def get(self, _request: Request) -> Response:
        return Response(AutomationSerializer(automation.state()).data)

    @extend_schema(
        summary=_("Pause or resume all automation (admin)"),
        request=AutomationBody,
        responses=AutomationSerializer,
        tags=["automation"],
    )
    def patch(self, request: Request) -> Response:
        return Response(AutomationSerializer(automation.switch(self.actor, **AutomationBody.of(request))).data)
