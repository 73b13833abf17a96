"""Reads: who is signed in where, and what the audit trail says."""

from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from storage_admin.accounts.models import AuditEntry, Session, Token, User


def sessions_of(user: User) -> QuerySet[Session]:
    """Where somebody is signed in, the latest seen first."""
    rows = Session.objects.filter(user=user, expire_date__gt=timezone.now()).exclude(since=None)
    return rows.order_by("-seen", "session_key").defer("session_data")


def users_listed() -> QuerySet[User]:
    """All users by name, each with the number of their ``open_sessions``."""
    now = timezone.now()
    open_ones = Count("sessions", filter=Q(sessions__expire_date__gt=now, sessions__since__isnull=False))
    return User.objects.annotate(open_sessions=open_ones).order_by("username")


def tokens_made_by(user: User) -> QuerySet[Token]:
    """Tokens that go on working whatever becomes of the user."""
    return Token.objects.filter(created_by=user.username)


def entries() -> QuerySet[AuditEntry]:
    """The audit trail, newest first."""
    return AuditEntry.objects.all()
