"""Users with one role each, API tokens, and the trail of what was done."""

from typing import Any, NoReturn

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

from storage_admin.accounts.roles import ROLE_CHOICES, Actor, Role


class User(AbstractUser):
    """Somebody who signs in with a password."""

    role = models.CharField(max_length=10, choices=ROLE_CHOICES, default=Role.VIEWER.label)
    #: Slugs of the hosts that they are limited to; empty means all of them.
    hosts = models.JSONField(default=list, blank=True)

    @property
    def actor(self) -> Actor:
        hosts = frozenset(self.hosts) if self.hosts else None
        return Actor(name=self.username, role=Role.named(self.role), hosts=hosts, user_id=self.pk)


class SavedView(models.Model):
    """A list's filters, search and order under a name: one's own, or shared with all."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="views")
    #: The name of the page's URL, as ``images``.
    page = models.CharField(max_length=40)
    name = models.CharField(max_length=100)
    #: The query string without page and cursor.
    query = models.TextField(blank=True)
    shared = models.BooleanField(default=False)
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["page", "name"]
        constraints = [models.UniqueConstraint(fields=["user", "page", "name"], name="one_view_per_name")]

    def __str__(self) -> str:
        return f"{self.page}: {self.name}"


class Token(models.Model):
    """A secret for automation. Only its digest is kept."""

    name = models.CharField(max_length=100, unique=True)
    digest = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=10, choices=ROLE_CHOICES)
    #: Slugs of the hosts that it is limited to; empty means all of them.
    hosts = models.JSONField(default=list, blank=True)
    created = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150)
    expires = models.DateTimeField(null=True, blank=True)
    last_used = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= timezone.now()

    @property
    def actor(self) -> Actor:
        hosts = frozenset(self.hosts) if self.hosts else None
        return Actor(name=f"token {self.name}", role=Role.named(self.role), hosts=hosts, token_id=self.pk)


class AppendOnlyError(Exception):
    """Somebody tried to change or delete what was recorded."""


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    def update(self, **_kwargs: Any) -> NoReturn:
        raise AppendOnlyError("The audit trail is append-only.")

    def delete(self) -> NoReturn:
        raise AppendOnlyError("The audit trail is append-only.")


class AuditEntry(models.Model):
    """One thing that somebody did. Written once."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    who = models.CharField(max_length=150)
    what = models.CharField(max_length=100)
    target = models.TextField(blank=True)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    #: Whether it was refused.
    refused = models.BooleanField(default=False)
    #: From where, where a request told.
    address = models.GenericIPAddressField(null=True)

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.who}: {self.what} {self.target}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError("The audit trail is append-only.")
        super().save(*args, **kwargs)

    def delete(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise AppendOnlyError("The audit trail is append-only.")
