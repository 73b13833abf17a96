"""Alerts, and the outbox from which webhooks and mail are sent. Knows nothing of hosts, jobs or images."""

from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _


class Alert(models.Model):
    """Something that is wrong: opened once, closed when it ends, acknowledged by name."""

    class Severity(models.TextChoices):
        DANGER = "danger"
        WARNING = "warning"

    #: What is wrong with what, as ``pool_over_threshold:12``; at most one alert of a key is open.
    key = models.CharField(max_length=200)
    kind = models.CharField(max_length=40)
    severity = models.CharField(max_length=10, choices=Severity)
    title = models.CharField(max_length=200)
    detail = models.TextField(blank=True)
    #: Slug of the host that it concerns, for tokens that are limited to some; empty where it concerns no single one.
    host = models.CharField(max_length=50, blank=True)
    #: Slug of the host under which the same thing is told already: this one is then for those alone who are limited to
    #: other hosts, and no event. Empty for all that is told by itself.
    told_under = models.CharField(max_length=50, blank=True)
    target_kind = models.CharField(max_length=10, blank=True)
    target_id = models.BigIntegerField(null=True)
    target_label = models.TextField(blank=True)
    opened = models.DateTimeField(default=timezone.now)
    #: When its detail changed last.
    updated = models.DateTimeField(default=timezone.now)
    closed = models.DateTimeField(null=True)
    acknowledged = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=150, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["key"], condition=Q(closed__isnull=True), name="one_open_alert_per_key")
        ]
        indexes = [models.Index(fields=["kind", "opened"])]

    def __str__(self) -> str:
        return self.title


class Webhook(models.Model):
    """An address that is told of events, signed with a secret."""

    name = models.CharField(max_length=100, unique=True)
    url = models.CharField(max_length=500)
    #: The key of the signature, encrypted; shown once, when it was made.
    secret_locked = models.BinaryField()
    #: The key before the last rotation, and until when signatures are made with it too.
    old_secret_locked = models.BinaryField(default=b"")
    old_secret_until = models.DateTimeField(null=True)
    #: Names of events; empty means all of them.
    events = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    created = models.DateTimeField(default=timezone.now)
    created_by = models.CharField(max_length=150)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Event(models.Model):
    """Something that happened; written in the transaction in which it did."""

    name = models.CharField(max_length=40)
    at = models.DateTimeField(default=timezone.now)
    host = models.CharField(max_length=50, blank=True)
    data = models.JSONField(default=dict)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.name} {self.pk}"


class Delivery(models.Model):
    """One event on its way to one webhook, or by mail (no webhook)."""

    class State(models.TextChoices):
        DUE = "due"
        SENT = "sent"
        GIVEN_UP = "given_up", _("given up")

    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries")
    webhook = models.ForeignKey(Webhook, null=True, on_delete=models.CASCADE, related_name="deliveries")
    #: Mail addresses; empty for a webhook.
    recipients = models.JSONField(default=list, blank=True)
    state = models.CharField(max_length=10, choices=State, default=State.DUE)
    attempts = models.PositiveSmallIntegerField(default=0)
    next_try = models.DateTimeField(default=timezone.now)
    #: Moved on by whoever tries, so that of two senders one sends.
    generation = models.PositiveIntegerField(default=0)
    #: When it was tried last.
    tried = models.DateTimeField(null=True)
    status_code = models.PositiveSmallIntegerField(null=True)
    problem = models.TextField(blank=True)
    sent = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "deliveries"
        indexes = [models.Index(fields=["next_try"], condition=Q(state="due"), name="delivery_due")]

    def __str__(self) -> str:
        return f"{self.event_id} to {self.webhook_id or self.recipients}"
