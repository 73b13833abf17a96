"""Endpoints of saved views."""

from typing import Any, ClassVar

import django_filters
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, serializers, status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts import saved_views
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import SavedView
from storage_admin.accounts.saved_views import LONGEST_NAME, LONGEST_QUERY
from storage_admin.given_filters import GivenFilters, YesOrNo
from storage_admin.rest.fields import Body, StrictBoolean, StrictText
from storage_admin.rest.views import EndpointSet


def _choices() -> list[tuple[str, str]]:
    return [(page.name, page.title) for page in saved_views.pages().values()]


class SavedViewSerializer(serializers.ModelSerializer[SavedView]):
    """A list's filters under a name."""

    page = serializers.CharField(read_only=True, help_text=_("Name of the list: images, jobs, hosts, ..."))
    query = serializers.CharField(read_only=True, help_text=_("The query string of the page."))
    shared = serializers.BooleanField(read_only=True, help_text=_("Visible to every user who may open the page."))
    mine = serializers.SerializerMethodField(help_text=_("Whether it belongs to the requesting user."))
    default = serializers.BooleanField(
        source="opens_first", read_only=True, help_text=_("Whether it is the requesting user's default view.")
    )
    created_by = serializers.CharField(source="by", read_only=True)

    class Meta:
        model = SavedView
        fields = ("id", "page", "name", "query", "shared", "mine", "default", "created_by", "created")
        read_only_fields = fields

    def get_mine(self, view: SavedView) -> bool:
        return saved_views.is_own(actor_of(self.context["request"]), view)


class NewSavedViewBody(Body):
    """A view to save."""

    name = StrictText(max_length=LONGEST_NAME)
    query = StrictText(max_length=LONGEST_QUERY, required=False, default="", allow_blank=True)
    shared = StrictBoolean(required=False, default=False, help_text=_("Visible to all users (operator)."))
    default = StrictBoolean(required=False, default=False, help_text=_("Makes it this user's default view."))

    def get_fields(self) -> Any:
        # Which lists there are is known when all their modules are loaded.
        return {"page": serializers.ChoiceField(choices=_choices()), **super().get_fields()}


class SavedViewBody(Body):
    """Changes to a view; omitted fields stay unchanged."""

    name = StrictText(max_length=LONGEST_NAME, required=False)
    query = StrictText(max_length=LONGEST_QUERY, required=False, allow_blank=True)
    shared = StrictBoolean(required=False)
    default = StrictBoolean(
        required=False, help_text=_("Makes it this user's default view; allowed for views that others share, too.")
    )


class SavedViewFilters(GivenFilters):
    page = django_filters.ChoiceFilter(choices=_choices)
    shared = YesOrNo(method="by_sharing")

    def by_sharing(self, rows: QuerySet[SavedView], _name: str, value: str) -> QuerySet[SavedView]:
        return rows.filter(shared=value == "true")


@extend_schema_view(
    list=extend_schema(summary=_("Saved views: your own and shared ones")),
    destroy=extend_schema(summary=_("Delete a view (another user's shared view: admin)")),
)
class SavedViewEndpoints(mixins.ListModelMixin, mixins.DestroyModelMixin, EndpointSet):
    queryset = SavedView.objects.none()
    serializer_class = SavedViewSerializer
    filterset_class = SavedViewFilters
    parameters: ClassVar[dict[str, frozenset[str]]] = {}

    def get_queryset(self) -> QuerySet[Any]:
        return saved_views.with_defaults(self.actor, saved_views.views_for(self.actor))

    @extend_schema(
        summary=_("Save a list's filters under a name"),
        description="Replaces your own view of that name on that list (200). Parameters that the list does not "
        "filter by are left out of `query`. A token can only save shared views.",
        request=NewSavedViewBody,
        responses={200: SavedViewSerializer, 201: SavedViewSerializer},
    )
    def create(self, request: Request) -> Response:
        given = NewSavedViewBody.of(request)
        try:
            view, new = saved_views.save(
                self.actor, given["page"], given["name"], given["query"], shared=given["shared"],
                default=given["default"],
            )  # fmt: skip
        except ValueError as error:
            raise ValidationError({"name": str(error)}) from None
        return self._shown(view, status.HTTP_201_CREATED if new else status.HTTP_200_OK)

    @extend_schema(
        summary=_("Change a view's name, filters or sharing"), request=SavedViewBody,
        responses=SavedViewSerializer,
    )  # fmt: skip
    def partial_update(self, request: Request, **_where: Any) -> Response:
        view = self.get_object()
        given = SavedViewBody.of(request)
        default = given.pop("default", None)
        try:
            with transaction.atomic():
                if given:
                    view = saved_views.change(self.actor, view, **given)
                if default is not None:
                    saved_views.set_default(self.actor, view, on=default)
        except ValueError as error:
            raise ValidationError({"name": str(error)}) from None
        return self._shown(view)

    def perform_destroy(self, instance: SavedView) -> None:
        saved_views.delete(self.actor, instance)

    def _shown(self, view: SavedView, code: int = status.HTTP_200_OK) -> Response:
        # Not of those that exist for the actor: an admin may have just ended the sharing of another's.
        shown = saved_views.with_defaults(self.actor, SavedView.objects.all()).get(pk=view.pk)
        return Response(SavedViewSerializer(shown, context=self.get_serializer_context()).data, status=code)
