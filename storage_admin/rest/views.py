"""What all endpoints share."""

from typing import Any, ClassVar

from django.utils.translation import gettext as _
from rest_framework.exceptions import ValidationError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import Actor, Role


class JsonOnly(BaseContentNegotiation):
    """The API speaks JSON, whatever ``Accept`` says; ``?format=`` is a filter here."""

    def select_parser(self, request: Request, parsers: Any) -> BaseParser | None:
        kind = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == kind), None)

    def select_renderer(self, _request: Request, renderers: Any, *_about: Any) -> tuple[BaseRenderer, str]:
        return renderers[0], renderers[0].media_type


class Endpoint(APIView):
    """An endpoint that knows who asks, and refuses parameters that it does not know.

    A misspelt filter would otherwise list everything as if it had matched.
    """

    content_negotiation_class = JsonOnly
    #: What an endpoint is, the schema says: OPTIONS is no method of the API.
    http_method_names = ["get", "post", "put", "patch", "delete", "head"]
    #: The role that each action (or lower-case method) needs at least; what is not named needs a viewer.
    roles: ClassVar[dict[str, Role]] = {}
    #: Parameters of the query string by action (or lower-case method).
    parameters: ClassVar[dict[str, frozenset[str]]] = {}
    #: A sentence for methods that do not work, where the general one would not help.
    not_allowed: ClassVar[dict[str, str]] = {}

    @property
    def actor(self) -> Actor:
        """Who sends the request."""
        return actor_of(self.request)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        action = getattr(self, "action", None) or (request.method or "").lower()
        self.actor.require(self.roles.get(action, Role.VIEWER))
        known = self.known_parameters(action)
        unknown = {name: _("Unknown parameter.") for name in request.query_params if name not in known}
        if unknown:
            listed = (
                _("Known parameters: {known}.").format(known=", ".join(sorted(known)))
                if known
                else _("This address takes no parameters.")
            )
            raise ValidationError({name: f"{text} {listed}" for name, text in unknown.items()})
        # A script's empty variable must not list everything either.
        empty = [name for name, value in request.query_params.items() if not value and name != "search"]
        if empty:
            raise ValidationError(dict.fromkeys(empty, _("The value is empty. Enter one, or leave the parameter out.")))
        twice = {name: _("Given more than once.") for name, values in request.query_params.lists() if len(values) > 1}
        if twice:
            raise ValidationError(twice)

    def known_parameters(self, action: str) -> frozenset[str]:
        """The names that the query string may have for an action."""
        return self.parameters.get(action, frozenset())


class EndpointSet(Endpoint, GenericViewSet[Any]):
    """Endpoints on one kind of thing; its list is filtered by ``filterset_class`` and paged."""

    lookup_value_converter = "int"
    page_parameters: ClassVar[frozenset[str]] = frozenset({"limit", "offset"})

    def known_parameters(self, action: str) -> frozenset[str]:
        if action != "list":
            return super().known_parameters(action)
        filters = getattr(self, "filterset_class", None)
        return self.page_parameters | frozenset(filters.base_filters if filters else ())

    def filter_queryset(self, queryset: Any) -> Any:
        return super().filter_queryset(queryset) if getattr(self, "action", None) == "list" else queryset
