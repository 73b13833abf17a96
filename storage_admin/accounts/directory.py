"""Who signs in by the directory of a site (OpenID Connect, LDAP, Active Directory), with rights that its groups say.

Groups are mapped to a role and hosts by ``settings.SIGN_IN_GROUPS``; whose groups map to nothing is let in nowhere.
What groups say is looked at anew at each sign-in. An account belongs to one source for ever: nobody takes over a local
account, or one of another source, by having its name or its e-mail address there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from storage_admin.accounts import second_factor, sessions
from storage_admin.accounts.models import Actor, Role, Session, User, audit
from storage_admin.accounts.users import RESERVED, check_user
from storage_admin.errors import InvalidError

OIDC, LDAP = User.Source.OIDC, User.Source.LDAP
#: Who changes rights when groups have changed, in the trail.
DIRECTORY = Actor(name="directory", role=Role.ADMIN)


class DeniedError(Exception):
    """Somebody whom the directory knows is not let in; the argument is a sentence for them."""


@dataclass(frozen=True)
class Rights:
    """A role, and the slugs of the hosts that it is limited to; none means all."""

    role: Role
    hosts: tuple[str, ...] = ()


def mapping() -> dict[str, Rights]:
    """Rights by group.

    Raises:
        ImproperlyConfigured: the setting cannot be understood. A typing error must not let anybody in everywhere.
    """
    given = settings.SIGN_IN_GROUPS
    if not isinstance(given, dict):
        raise ImproperlyConfigured('SIGN_IN_GROUPS is not a JSON object such as {"admins": {"role": "admin"}}.')
    return {group: _rights(group, wanted) for group, wanted in given.items()}


def _rights(group: str, wanted: Any) -> Rights:
    if not isinstance(wanted, dict) or not isinstance(wanted.get("role"), str) or wanted.keys() - {"role", "hosts"}:
        raise ImproperlyConfigured(f'SIGN_IN_GROUPS: {group} needs {{"role": …}}, and may have "hosts": [slugs].')
    hosts = wanted.get("hosts")
    # An empty list would mean all hosts, which is said by leaving it out.
    if "hosts" in wanted and not (isinstance(hosts, list) and hosts and all(isinstance(one, str) for one in hosts)):
        raise ImproperlyConfigured(f"SIGN_IN_GROUPS: the hosts of {group} must be a list of slugs.")
    try:
        return Rights(Role.named(wanted["role"]), tuple(sorted(set(hosts or ()))))
    except ValueError as error:
        raise ImproperlyConfigured(f"SIGN_IN_GROUPS: {group}: {error}") from None


def rights_of(groups: Iterable[str]) -> Rights | None:
    """What somebody in these groups may do: the highest role, on the hosts of the groups that give it; ``None`` for
    nothing.

    A lower role on more hosts is not added: an account has one role for all its hosts.
    """
    table = mapping()
    known = [table[group] for group in set(groups) if group in table]
    if not known:
        return None
    role = max(rights.role for rights in known)
    giving = [rights for rights in known if rights.role == role]
    everywhere = any(not rights.hosts for rights in giving)
    return Rights(role, () if everywhere else tuple(sorted({host for rights in giving for host in rights.hosts})))


def admit(source: str, external_id: str, username: str, groups: Iterable[str], *, email: str = "") -> User:
    """The account of somebody whom the directory has proven, with the rights that their groups give now.

    Args:
        source: :data:`OIDC` or :data:`LDAP`.
        external_id: what the directory never gives to somebody else.
        username: what they are called here, when they come for the first time.

    Raises:
        DeniedError: no group of theirs gives a right, or the name belongs to another account.
    """
    rights = rights_of(groups)
    with transaction.atomic():
        user = User.objects.select_for_update().filter(source=source, external_id=external_id).first()
        if rights is None:
            if user is not None:
                _end(user)
            # After the transaction: what it has changed stays.
        elif user is None:
            user = _add(source, external_id, username, rights, email)
        else:
            _update(user, rights, email)
    if user is not None and not user.is_active:
        raise DeniedError(_("An admin has deactivated your account."))
    if rights is None or user is None:
        raise DeniedError(_("None of your groups has access to this dashboard. Ask one of its admins."))
    return user


def _add(source: str, external_id: str, username: str, rights: Rights, email: str) -> User:
    username = AbstractUser.normalize_username(username.strip())
    taken = User.objects.filter(username__iexact=username).exists()
    if taken or username.lower() in RESERVED:
        told = _("The user name {username} is already taken on this dashboard. Ask one of its admins.")
        raise DeniedError(told.format(username=username))
    user = User(
        username=username, source=source, external_id=external_id, role=rights.role.label, hosts=list(rights.hosts),
        email=email if len(email) <= 254 else "",
    )  # fmt: skip
    user.set_unusable_password()
    try:
        check_user(user)
        with transaction.atomic():
            user.save()
    except (ValueError, InvalidError, IntegrityError):
        raise DeniedError(
            _("Your user name in the directory cannot be used in this dashboard. Ask one of its admins.")
        ) from None
    after = {"role": user.role, "hosts": user.hosts, "source": source}
    audit(DIRECTORY, "user added", user.username, after=after)
    return user


def _update(user: User, rights: Rights, email: str) -> None:
    before = {"role": user.role, "hosts": user.hosts}
    after = {"role": rights.role.label, "hosts": list(rights.hosts)}
    user.role, user.hosts = rights.role.label, list(rights.hosts)
    if email and len(email) <= 254:
        user.email = email
    user.save(update_fields=["role", "hosts", "email"])
    if before != after:
        audit(DIRECTORY, "user changed", user.username, before=before, after=after)
        # Sessions elsewhere go on with the new rights, which are the row's; not without a factor that they now need.
        if second_factor.is_missing(user):
            _end(user)


def _end(user: User) -> None:
    if ended := sessions.end(Session.objects.filter(user=user)):
        audit(DIRECTORY, "sessions ended", user.username, before={"sessions": ended})
