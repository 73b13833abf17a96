"""Who signs in with something beside their password: which roles have to, who does, and how a lost one is taken away.

An authenticator app (TOTP), passkeys and recovery codes are django-allauth's; here is what is decided about them.
"""

from collections.abc import Iterable
from typing import Any

from allauth.mfa import signals
from allauth.mfa.models import Authenticator
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _

from storage_admin.accounts import sessions
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import Actor, Role, Session, SignInRules, User, audit
from storage_admin.errors import InvalidError

#: In a session: nothing else can be done in it until a second factor is set up.
FIRST = "second_factor_first"
#: What authenticators are called.
KINDS = {
    Authenticator.Type.TOTP.value: "authenticator app",
    Authenticator.Type.WEBAUTHN.value: "passkey",
    Authenticator.Type.RECOVERY_CODES.value: "recovery codes",
}
#: Recovery codes are none: they are for when these are lost.
_FACTORS = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)


def required_roles() -> frozenset[str]:
    """Roles that have to have one, by the page Users or by the settings."""
    chosen = SignInRules.objects.values_list("second_factor_roles", flat=True).first() or []
    return frozenset(chosen) | fixed_roles()


def fixed_roles() -> frozenset[str]:
    """Those of the settings, which no page changes."""
    return frozenset(Role.named(name).label for name in settings.SECOND_FACTOR_ROLES)


def is_missing(user: User) -> bool:
    """Whether somebody's role has to have one, and they have none. An OpenID Connect provider asks for its own."""
    return user.source != User.Source.OIDC and user.role in required_roles() and not has_one(user)


def has_one(user: User) -> bool:
    """Whether somebody is asked for more than a password."""
    return bool(Authenticator.objects.filter(user=user, type__in=_FACTORS).exists())


def may_remove(authenticator: Any) -> bool:
    """Whether somebody may take away one of their own: not the last one, where their role has to have one."""
    user: User = authenticator.user
    others = Authenticator.objects.filter(user=user, type__in=_FACTORS).exclude(pk=authenticator.pk)
    return user.role not in required_roles() or others.exists()


def kinds_of(user: User) -> list[str]:
    """What somebody has, in words."""
    kinds = Authenticator.objects.filter(user=user).order_by("pk").values_list("type", flat=True)
    return [KINDS[kind] for kind in kinds]


def require_for(actor: Actor, roles: Iterable[Role]) -> None:
    """Decides which roles have to have one. Who has none is signed out, and sets one up at the next sign-in.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: ``own_account``: the actor has to have one by that, and has none.
    """
    actor.require_everywhere(Role.ADMIN)
    wanted = sorted({role.label for role in roles})
    with transaction.atomic():
        row, __ = SignInRules.objects.select_for_update().get_or_create(pk=SignInRules.ONLY)
        before = row.second_factor_roles
        if before == wanted:
            return
        own = User.objects.filter(pk=actor.user_id or 0, role__in=wanted).first()
        if own is not None and own.source != User.Source.OIDC and not has_one(own):
            raise InvalidError(_("Set up a second factor for your own account first."), code="own_account")
        row.second_factor_roles = wanted
        row.save()
        audit(actor, "second factor required", "sign-in", before={"roles": before}, after={"roles": wanted})
        _sign_out_who_lacks_one(wanted)


def reset(actor: Actor, user: User) -> list[str]:
    """Takes away all that somebody has beside their password, and ends their sessions: for a device that is lost.

    Returns:
        What they had, in words.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: ``own_account``.
    """
    actor.require_everywhere(Role.ADMIN)
    if user.pk == actor.user_id:
        raise InvalidError(_("This is your own account. Change it on the page Second factor."), code="own_account")
    with transaction.atomic():
        kinds = kinds_of(user)
        Authenticator.objects.filter(user=user).delete()
        ended = sessions.end(Session.objects.filter(user=user))
        audit(
            actor, "second factor reset", user.username, before={"second_factor": kinds},
            after={"sessions_ended": ended},
        )  # fmt: skip
    return kinds


def _sign_out_who_lacks_one(roles: list[str]) -> None:
    with_one = Authenticator.objects.filter(type__in=_FACTORS).values("user")
    lacking = Session.objects.filter(user__role__in=roles).exclude(user__in=with_one)
    lacking.exclude(user__source=User.Source.OIDC).delete()


def listen() -> None:
    """Has django-allauth tell what people add, remove and make anew of their own: it stands in the audit trail."""
    signals.authenticator_added.connect(_added)
    signals.authenticator_removed.connect(_removed)
    signals.authenticator_reset.connect(_made_anew)


def _added(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    if authenticator.type != authenticator.Type.RECOVERY_CODES:
        request.session.pop(FIRST, None)
    _write(request, authenticator, "second factor added")


def _removed(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    _write(request, authenticator, "second factor removed")


def _made_anew(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    _write(request, authenticator, "recovery codes made anew")


def _write(request: HttpRequest, authenticator: Any, what: str) -> None:
    actor = actor_of(request)
    audit(actor, what, actor.name, after={"kind": KINDS[authenticator.type]})
