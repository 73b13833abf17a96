"""Users with one role each, their sessions, API tokens, and the trail of what was done.

And who acts, and what they may do: services ask an :class:`Actor`; what is not allowed is denied.
"""

import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from typing import Any, NoReturn

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _


class Role(IntEnum):
    """Each role may do all that the ones below it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role":
        """The role of that name.

        Raises:
            ValueError: there is none.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            told = gettext("{name!r} is not a role. Choose viewer, operator or admin.")
            raise ValueError(told.format(name=name)) from None

    @property
    def label(self) -> str:
        return self.name.lower()


ROLE_CHOICES = [(role.label, role.label.capitalize()) for role in Role]


class ForbiddenError(Exception):
    """The actor's role or host scope does not allow it; the argument is a sentence for them."""


@dataclass(frozen=True)
class Actor:
    """A user in a browser, a token, or the scheduler.

    Args:
        name: as it stands in the audit trail.
        hosts: slugs that a user or token is limited to; ``None`` means every host.
        address: where the request came from, for the audit trail.
    """

    name: str
    role: Role
    hosts: frozenset[str] | None = None
    user_id: int | None = None
    token_id: int | None = None
    address: str | None = field(default=None, compare=False)

    def require(self, role: Role, host: str | None = None) -> None:
        """Lets the call go on.

        Args:
            host: slug of the host that it touches, when it touches one.

        Raises:
            ForbiddenError: the role is too low, or the host outside of the actor's scope.
        """
        if self.role < role:
            told = gettext("This needs the role {label}; {name} has the role {role_label}.")
            raise ForbiddenError(told.format(label=role.label, name=self.name, role_label=self.role.label))
        if host is not None and not self.sees(host):
            raise ForbiddenError(gettext("{who} has no access to the host {host}.").format(who=self._named, host=host))

    def require_everywhere(self, role: Role) -> None:
        """Lets the call go on if it concerns no single host: tokens, users, the audit trail.

        Raises:
            ForbiddenError: the role is too low, or the actor is limited to some hosts.
        """
        self.require(role)
        if self.hosts is not None:
            told = gettext("{who} is limited to some hosts, but this needs access to all hosts.")
            raise ForbiddenError(told.format(who=self._named))

    @property
    def _named(self) -> str:
        return self.name if self.token_id is None else f"The {self.name}"

    def sees(self, host: str) -> bool:
        """Whether things on the host of that slug exist for this actor."""
        return self.hosts is None or host in self.hosts


#: What the scheduler and the dashboard itself do.
SYSTEM = Actor(name="system", role=Role.ADMIN)


class User(AbstractUser):
    """Somebody who signs in."""

    class Source(models.TextChoices):
        LOCAL = "", _("local")
        OIDC = "oidc", "OpenID Connect"
        LDAP = "ldap", "LDAP"

    role = models.CharField(max_length=10, choices=ROLE_CHOICES, default=Role.VIEWER.label)
    #: Slugs of the hosts that they are limited to; empty means all of them.
    hosts = models.JSONField(default=list, blank=True)
    #: Whether the password is one that somebody else has seen: nothing else can be done until it is changed.
    must_change_password = models.BooleanField(default=False)
    #: Where they are known: here, or in a directory whose groups decide about role and hosts.
    source = models.CharField(max_length=10, choices=Source.choices, blank=True, default=Source.LOCAL)
    #: What the directory never gives to somebody else; empty for a local account.
    external_id = models.CharField(max_length=400, blank=True, default="")
    #: In which pages show times to them; empty for that of their browser.
    time_zone = models.CharField(max_length=64, blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["source", "external_id"], condition=~Q(external_id=""), name="one_user_per_external_id"
            )
        ]

    @property
    def actor(self) -> Actor:
        hosts = frozenset(self.hosts) if self.hosts else None
        return Actor(name=self.username, role=Role.named(self.role), hosts=hosts, user_id=self.pk)


class Session(AbstractBaseSession):
    """A browser in which somebody is signed in, or, with no ``since``, waits for the second step of that. Its key is as
    good as a password, and is never shown.
    """

    #: By which it is named. For a moment two rows have it, when a session gets another key.
    uid = models.UUIDField(default=uuid.uuid4, db_index=True)
    user = models.ForeignKey(User, on_delete=models.CASCADE, null=True, related_name="sessions")
    since = models.DateTimeField(null=True)
    #: When they did something last, within a minute; a page that refreshes itself does not count.
    seen = models.DateTimeField(null=True)
    address = models.GenericIPAddressField(null=True)
    #: In short, as ``Firefox on Linux``.
    browser = models.CharField(max_length=60, blank=True)

    @classmethod
    def get_session_store_class(cls) -> type[SessionBase]:
        store: type[SessionBase] = import_module(settings.SESSION_ENGINE).SessionStore
        return store


class SavedView(models.Model):
    """A list's filters, search and order under a name: one's own, or shared with all."""

    #: Whose it is; null for one that a token has shared.
    user = models.ForeignKey(User, on_delete=models.CASCADE, null=True, related_name="views")
    #: Who saved it, as in the audit trail.
    by = models.CharField(max_length=150, blank=True)
    #: The name of the page's URL, as ``images``.
    page = models.CharField(max_length=40)
    name = models.CharField(max_length=100)
    #: The query string without page and cursor.
    query = models.TextField(blank=True)
    shared = models.BooleanField(default=False)
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["page", "name"]
        constraints = [
            models.UniqueConstraint(fields=["user", "page", "name"], name="one_view_per_name"),
            models.UniqueConstraint(
                fields=["page", "name"], condition=Q(user=None), name="one_view_of_tokens_per_name"
            ),
        ]
        indexes = [models.Index(fields=["page"], condition=Q(shared=True), name="view_shared")]

    def __str__(self) -> str:
        return f"{self.page}: {self.name}"


class DefaultView(models.Model):
    """What a page opens with for somebody, when its address says nothing else."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="default_views")
    page = models.CharField(max_length=40)
    view = models.ForeignKey(SavedView, on_delete=models.CASCADE, related_name="default_of")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "page"], name="one_default_view_per_page")]

    def __str__(self) -> str:
        return f"{self.user_id}: {self.view}"


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


class SignInRules(models.Model):
    """What admins have decided about signing in: one row, or none as long as they decided nothing."""

    ONLY = 1
    #: Roles that have to have a second factor.
    second_factor_roles = models.JSONField(default=list, blank=True)

    def __str__(self) -> str:
        return "rules of signing in"


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
        indexes = [
            models.Index(fields=["who", "-id"], name="audit_by_who"),
            models.Index(fields=["what", "-id"], name="audit_by_what"),
        ]

    def __str__(self) -> str:
        return f"{self.who}: {self.what} {self.target}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError("The audit trail is append-only.")
        super().save(*args, **kwargs)

    def delete(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise AppendOnlyError("The audit trail is append-only.")


def audit(
    actor: Actor,
    what: str,
    target: object = "",
    *,
    before: object = None,
    after: object = None,
    refused: bool = False,
) -> None:
    """Records what ``actor`` did, or was refused; ``before`` and ``after`` are whatever JSON can carry."""
    AuditEntry.objects.create(
        who=actor.name, what=what, target=str(target), before=before, after=after, refused=refused,
        address=actor.address,
    )  # fmt: skip


class RefusedAttempts(models.Model):
    """What is refused again and again stands once in the trail; how often it was since, is counted here."""

    #: Digest of who, what and from where.
    key = models.CharField(max_length=64, unique=True)
    who = models.CharField(max_length=150)
    what = models.CharField(max_length=100)
    target = models.TextField(blank=True)
    address = models.GenericIPAddressField(null=True)
    since = models.DateTimeField(default=timezone.now, db_index=True)
    #: How many came after the one that is written.
    more = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"
