"""Alerts, webhooks and deliveries as the API shows them."""

from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from storage_admin.events import addresses
from storage_admin.events.models import Alert, Delivery, Webhook
from storage_admin.events.services import KINDS, NAMES
from storage_admin.rest.fields import Body, StrictBoolean, StrictText, TextOrNull
from storage_admin.rest.shown import Shown

EVENTS = [(name, name) for name in NAMES]


class AlertTargetSerializer(serializers.Serializer[Any]):
    """The object that an alert concerns; null if it concerns no single one."""

    kind = serializers.CharField()
    id = serializers.IntegerField()
    label = serializers.CharField()  # type: ignore[assignment]  # a field of that name, not the field's own label


class AlertSerializer(Shown, serializers.ModelSerializer[Alert]):
    """An alert. ``closed`` is null while it is open."""

    kind = serializers.ChoiceField(choices=list(KINDS.items()), read_only=True)
    host = TextOrNull(help_text=_("Slug of the host; null if the alert does not concern a single host."))
    target = serializers.SerializerMethodField()
    acknowledged_by = TextOrNull()
    closed = serializers.DateTimeField(read_only=True, allow_null=True)
    acknowledged = serializers.DateTimeField(read_only=True, allow_null=True)

    class Meta:
        model = Alert
        fields = (
            "id", "kind", "severity", "title", "detail", "host", "target", "opened", "updated", "closed",
            "acknowledged", "acknowledged_by",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(AlertTargetSerializer(allow_null=True))
    def get_target(self, alert: Alert) -> dict[str, Any] | None:
        if alert.target_id is None:
            return None
        return {"kind": alert.target_kind, "id": alert.target_id, "label": alert.target_label}


class WebhookSerializer(serializers.ModelSerializer[Webhook]):
    """A URL that receives events. The URL's path and query values are not shown, nor is the secret."""

    url = serializers.SerializerMethodField()
    events = serializers.ListField(child=serializers.CharField(), read_only=True, help_text=_("Empty for all events."))
    old_secret_until = serializers.DateTimeField(
        read_only=True,
        allow_null=True,
        help_text=_("Until this time, deliveries are also signed with the previous secret."),
    )
    on_their_way = serializers.IntegerField(read_only=True, help_text=_("Number of pending deliveries."))
    failing = serializers.IntegerField(
        read_only=True, help_text=_("Number of pending deliveries that have failed at least once.")
    )
    given_up = serializers.IntegerField(read_only=True)
    last_sent = serializers.DateTimeField(read_only=True, allow_null=True)

    class Meta:
        model = Webhook
        fields = (
            "id", "name", "url", "events", "enabled", "created", "created_by", "old_secret_until", "on_their_way",
            "failing", "given_up", "last_sent",
        )  # fmt: skip
        read_only_fields = fields

    def get_url(self, hook: Webhook) -> str:
        return addresses.shown(hook.url)


class NewWebhookSerializer(WebhookSerializer):
    """A new webhook with its secret, which is shown only once."""

    secret = serializers.CharField(
        read_only=True, help_text=_("Secret for verifying signatures. It is not shown again.")
    )

    class Meta:
        model = Webhook
        fields = (*WebhookSerializer.Meta.fields, "secret")
        read_only_fields = fields


class SecretSerializer(serializers.Serializer[Any]):
    """A webhook's new secret, which is shown only once."""

    secret = serializers.CharField()
    old_secret_until = serializers.DateTimeField()


class WebhookBody(Body):
    """A webhook to create."""

    name = StrictText(max_length=100)
    url = StrictText(max_length=addresses.LONGEST)
    events = serializers.ListField(child=serializers.ChoiceField(choices=EVENTS), required=False, max_length=20)
    enabled = StrictBoolean(required=False)


class WebhookChanges(Body):
    """Changes to a webhook; omitted fields stay unchanged."""

    name = StrictText(max_length=100, required=False)
    url = StrictText(max_length=addresses.LONGEST, required=False)
    events = serializers.ListField(child=serializers.ChoiceField(choices=EVENTS), required=False, max_length=20)
    enabled = StrictBoolean(required=False)


class DeliverySerializer(serializers.ModelSerializer[Delivery]):
    """The delivery of an event to a webhook."""

    event = serializers.CharField(source="event.name", read_only=True)
    event_id = serializers.IntegerField(read_only=True)
    at = serializers.DateTimeField(source="event.at", read_only=True)
    webhook = serializers.IntegerField(source="webhook_id", read_only=True)
    next_try = serializers.SerializerMethodField(
        help_text=_("Time of the next attempt; null if the delivery is no longer pending.")
    )
    problem = TextOrNull(help_text=_("Why the last attempt failed."))

    class Meta:
        model = Delivery
        fields = (
            "id", "event", "event_id", "at", "webhook", "state", "attempts", "tried", "next_try", "sent", "status_code",
            "problem",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field({"type": ["string", "null"], "format": "date-time"})
    def get_next_try(self, delivery: Delivery) -> str | None:
        return delivery.next_try.isoformat() if delivery.state == Delivery.State.DUE else None


class MailSerializer(DeliverySerializer):
    """The delivery of an event to an address of ``ALERT_EMAILS``."""

    to = serializers.ListField(child=serializers.CharField(), source="recipients", read_only=True)

    class Meta:
        model = Delivery
        fields = tuple("to" if name == "webhook" else name for name in DeliverySerializer.Meta.fields)
        read_only_fields = fields
