"""Endpoints of alerts, and of webhooks, which are for admins who are limited to no host."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts.models import Role
from storage_admin.errors import InvalidError
from storage_admin.events import selectors, services
from storage_admin.events import webhooks as writes
from storage_admin.events.filters import AlertFilters, DeliveryFilters
from storage_admin.events.models import Alert, Delivery, Webhook
from storage_admin.events.serializers import (
    AlertSerializer,
    DeliverySerializer,
    MailSerializer,
    NewWebhookSerializer,
    SecretSerializer,
    WebhookBody,
    WebhookChanges,
    WebhookSerializer,
)
from storage_admin.rest.fields import Body
from storage_admin.rest.views import EndpointSet

T = TypeVar("T")


class Nothing(Body):
    """Nothing: the address says it all."""


def _taken(work: Callable[[], T]) -> T:
    try:
        return work()
    except InvalidError as error:
        raise ValidationError(dict(error.fields) or error.detail) from None


@extend_schema_view(
    list=extend_schema(summary=_("Alerts, newest first"), description=_("With `?state=open`, only open alerts.")),
    retrieve=extend_schema(summary=_("One alert")),
)
class AlertEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    serializer_class = AlertSerializer
    filterset_class = AlertFilters
    queryset = Alert.objects.none()
    roles: ClassVar[dict[str, Role]] = {"ack": Role.OPERATOR}

    def get_queryset(self) -> QuerySet[Any]:
        return selectors.alerts_for(self.actor)

    @extend_schema(
        summary=_("Acknowledge an alert"),
        description=_("A later acknowledgement does not replace the first one."),
        request=Nothing,
        responses=AlertSerializer,
    )
    @action(detail=True, methods=["post"])
    def ack(self, request: Request, **_where: Any) -> Response:
        Nothing.of(request)
        return Response(AlertSerializer(services.acknowledge(self.actor, self.get_object())).data)


@extend_schema_view(
    list=extend_schema(summary=_("Webhooks (admin)")), retrieve=extend_schema(summary=_("One webhook (admin)"))
)
class WebhookEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Webhook.objects.none()
    serializer_class = WebhookSerializer
    filterset_class: Any = None
    parameters: ClassVar[dict[str, frozenset[str]]] = {
        name: frozenset({"limit", "offset", *DeliveryFilters.base_filters}) for name in ("deliveries", "mails")
    }

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self.actor.require_everywhere(Role.ADMIN)

    def get_queryset(self) -> QuerySet[Any]:
        return selectors.webhooks()

    @extend_schema(
        summary=_("Create a webhook (admin)"),
        description="The response contains the secret for verifying signatures, which cannot be shown again. See "
        "docs/alerts.md.",
        request=WebhookBody,
        responses={201: NewWebhookSerializer},
    )
    def create(self, request: Request) -> Response:
        given = WebhookBody.of(request)
        hook, secret = _taken(lambda: writes.create(self.actor, **given))
        shown = self.get_queryset().get(pk=hook.pk)
        shown.secret = secret
        return Response(NewWebhookSerializer(shown).data, status=status.HTTP_201_CREATED)

    @extend_schema(
        summary=_("Change a webhook (admin)"),
        description=_("Disabling a webhook drops its pending deliveries."),
        request=WebhookChanges,
        responses=WebhookSerializer,
    )
    def partial_update(self, request: Request, **_where: Any) -> Response:
        hook = self.get_object()
        given = WebhookChanges.of(request)
        _taken(lambda: writes.update(self.actor, hook, **given))
        return Response(WebhookSerializer(self.get_object()).data)

    @extend_schema(summary=_("Delete a webhook and its delivery history (admin)"), responses={204: None})
    def destroy(self, _request: Request, **_where: Any) -> Response:
        writes.remove(self.actor, self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(summary=_("Rotate a webhook's secret (admin)"), request=Nothing, responses=SecretSerializer)
    @action(detail=True, methods=["post"], url_path="rotate-secret")
    def rotate_secret(self, request: Request, **_where: Any) -> Response:
        Nothing.of(request)
        hook = self.get_object()
        secret = writes.rotate(self.actor, hook)
        return Response(SecretSerializer({"secret": secret, "old_secret_until": hook.old_secret_until}).data)

    @extend_schema(summary=_("Send a test to a webhook (admin)"), request=Nothing, responses={202: DeliverySerializer})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, **_where: Any) -> Response:
        Nothing.of(request)
        hook = self.get_object()
        delivery = _taken(lambda: writes.send_test(self.actor, hook))
        return Response(DeliverySerializer(delivery).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(summary=_("Deliveries of a webhook, newest first (admin)"), responses=DeliverySerializer(many=True))
    @action(detail=True, methods=["get"], filterset_class=DeliveryFilters)
    def deliveries(self, _request: Request, **_where: Any) -> Response:
        return self._listed(selectors.deliveries().filter(webhook=self.get_object()), DeliverySerializer)

    def _listed(self, rows: QuerySet[Delivery], shape: type[DeliverySerializer]) -> Response:
        filters = DeliveryFilters(self.request.query_params, queryset=rows)
        if not filters.is_valid():
            raise ValidationError(filters.errors)
        page: Any = self.paginate_queryset(filters.qs)
        return self.get_paginated_response(shape(page, many=True).data)

    @extend_schema(
        summary=_("Resend a delivery (admin)"),
        request=Nothing,
        responses={202: DeliverySerializer},
        parameters=[OpenApiParameter("delivery", int, OpenApiParameter.PATH)],
    )
    @action(detail=True, methods=["post"], url_path="deliveries/<int:delivery>/resend")
    def resend(self, request: Request, delivery: int, **_where: Any) -> Response:
        Nothing.of(request)
        row = get_object_or_404(Delivery.objects.select_related("webhook"), pk=delivery, webhook=self.get_object())
        again = _taken(lambda: writes.resend(self.actor, row))
        return Response(DeliverySerializer(again).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(
        summary=_("Send a test mail to every address in ALERT_EMAILS (admin)"),
        description=_("Returns 400 if no address is set."),
        request=Nothing,
        responses={202: MailSerializer(many=True)},
        operation_id="webhooks_mail_test",
    )
    @action(detail=False, methods=["post"], url_path="mail/test", pagination_class=None)
    def mail_test(self, request: Request) -> Response:
        Nothing.of(request)
        sent = _taken(lambda: writes.send_test_mail(self.actor))
        return Response(MailSerializer(sent, many=True).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(
        summary=_("Mail deliveries, newest first (admin)"),
        responses=MailSerializer(many=True),
        operation_id="webhooks_mail_deliveries_list",
    )
    @action(detail=False, methods=["get"], url_path="mail/deliveries", filterset_class=DeliveryFilters)
    def mails(self, _request: Request) -> Response:
        return self._listed(selectors.deliveries().filter(webhook=None), MailSerializer)

    @extend_schema(
        summary=_("Resend a mail (admin)"),
        request=Nothing,
        responses={202: MailSerializer},
        parameters=[OpenApiParameter("delivery", int, OpenApiParameter.PATH)],
        operation_id="webhooks_mail_deliveries_resend",
    )
    @action(detail=False, methods=["post"], url_path="mail/deliveries/<int:delivery>/resend")
    def resend_mail(self, request: Request, delivery: int) -> Response:
        Nothing.of(request)
        row = get_object_or_404(selectors.deliveries(), pk=delivery, webhook=None)
        again = _taken(lambda: writes.resend(self.actor, row))
        return Response(MailSerializer(again).data, status=status.HTTP_202_ACCEPTED)
