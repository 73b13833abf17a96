"""Writes: who may sign in, with which role and for which hosts; their sessions."""

import secrets
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from storage_admin.accounts import scopes, second_factor, sessions
from storage_admin.accounts.models import Actor, Role, Session, User, audit
from storage_admin.errors import InvalidError, of_field, require_right
from storage_admin.moments import zone_named

#: Names that stand for something else in the audit trail.
RESERVED = frozenset({"system", "nobody", "anonymous"})


def add_user(
    actor: Actor, username: str, role: Role, *, hosts: Iterable[str] = (), email: str = ""
) -> tuple[User, str]:
    """Adds a user.

    Returns:
        The user, and a one-time password, which is not kept and has to be changed at the first sign-in.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: the name is taken or cannot be one, there is no such host, or the address is none; it names all
            fields that are wrong.
    """
    actor.require_everywhere(Role.ADMIN)
    username, wrong = AbstractUser.normalize_username(username.strip()), dict[str, str]()
    limit = _limit(hosts, (), wrong)
    user = User(username=username, role=role.label, hosts=limit, email=email.strip())
    password = _one_time(user)
    wrong |= _faults(user)
    if username.lower() in RESERVED:
        told = _("The name {username} has a special meaning in the audit trail. Choose another name.")
        wrong["username"] = told.format(username=username)
    try:
        with transaction.atomic():
            if "username" not in wrong and User.objects.filter(username__iexact=username).exists():
                wrong["username"] = _taken(username)
            require_right(wrong)
            user.save()
            audit(actor, "user added", username, after=_shown(user))
    except IntegrityError:
        raise of_field("username", _taken(username)) from None
    return user, password


def change_user(actor: Actor, user: User, **wanted: Any) -> User:
    """Changes what an admin decides of a user; what is not given stays. It holds from their next request on.

    Args:
        wanted: ``role`` (a :class:`Role`), ``hosts``, ``email``, ``is_active``.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: as :func:`add_user`; ``last_admin``, ``own_account``, ``directory_user``.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        admins = _locked_admins()
        user = User.objects.select_for_update().get(pk=user.pk)
        wrong: dict[str, str] = {}
        values = _values(user, wanted, wrong)
        before = {name: getattr(user, name) for name in values}
        if not values and not wrong:
            return user
        if user.pk == actor.user_id and values.keys() - {"email"}:
            told = _("This is your own account. Only another admin can change its role or hosts, or deactivate it.")
            raise InvalidError(told, code="own_account")
        if user.source != User.Source.LOCAL and values.keys() & {"role", "hosts"}:
            told = _("The role and hosts of {user} come from directory groups. Change those groups instead.")
            raise InvalidError(told.format(user=user.username), code="directory_user")
        for name, value in values.items():
            setattr(user, name, value)
        require_right(wrong | _faults(user))
        _keep_an_admin(admins, user)
        user.save(update_fields=list(values))
        audit(actor, _what(values), user.username, before=before, after=values)
        if not user.is_active or ("role" in values and second_factor.is_missing(user)):
            Session.objects.filter(user=user).delete()
    return user


def reset_password(actor: Actor, user: User) -> str:
    """Gives a user a one-time password, and ends all their sessions.

    Returns:
        The password, which is not kept and has to be changed at the next sign-in.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: ``own_account``, ``directory_user``.
    """
    actor.require_everywhere(Role.ADMIN)
    if user.pk == actor.user_id:
        told = _("This is your own account. Change your password on the page Your account.")
        raise InvalidError(told, code="own_account")
    if user.source != User.Source.LOCAL:
        told = _("The password of {user} is stored in the directory. Reset it there.")
        raise InvalidError(told.format(user=user.username), code="directory_user")
    password = _one_time(user)
    with transaction.atomic():
        user.save(update_fields=["password", "must_change_password"])
        ended = sessions.end(Session.objects.filter(user=user))
        audit(actor, "password reset", user.username, after={"sessions_ended": ended})
    return password


def password_chosen(actor: Actor, user: User, *, stays: str) -> None:
    """Records that somebody chose a password of their own; the password itself stands nowhere.

    Args:
        stays: the key of the one session that does not end.
    """
    with transaction.atomic():
        User.objects.filter(pk=user.pk).update(must_change_password=False)
        Session.objects.filter(user=user).exclude(session_key=stays).delete()
        audit(actor, "password changed", actor.name)


def choose_zone(actor: Actor, user: User, name: str) -> None:
    """Has pages show times in another zone to somebody, for themselves.

    Args:
        name: of the zone; empty for that of their browser.

    Raises:
        InvalidError: there is no such zone.
    """
    if name and zone_named(name) is None:
        raise InvalidError(_("This time zone does not exist. Choose one from the list."))
    before, user.time_zone = user.time_zone, name
    if name != before:
        with transaction.atomic():
            user.save(update_fields=["time_zone"])
            audit(actor, "time zone changed", user.username, before={"time_zone": before}, after={"time_zone": name})


def end_sessions(actor: Actor, user: User, *, stays: str = "") -> int:
    """Signs somebody out everywhere; how many sessions that were.

    Args:
        stays: uid of a session that does not end.

    Raises:
        ForbiddenError: it is another's account, and the actor is no admin or limited to some hosts.
    """
    _require_own_or_admin(actor, user)
    with transaction.atomic():
        rows = Session.objects.filter(user=user)
        ended = sessions.end(rows.exclude(uid=UUID(stays)) if stays else rows)
        if ended:
            audit(actor, "sessions ended", user.username, before={"sessions": ended})
    return ended


def end_session(actor: Actor, user: User, uid: UUID) -> bool:
    """Signs somebody out of one browser; whether there was such a session.

    Raises:
        ForbiddenError: as :func:`end_sessions`.
    """
    _require_own_or_admin(actor, user)
    with transaction.atomic():
        row = Session.objects.filter(user=user, uid=uid).first()
        if row is None or not Session.objects.filter(pk=row.pk).delete()[0]:
            return False
        audit(actor, "session ended", user.username, before={"address": row.address, "browser": row.browser})
    return True


def _require_own_or_admin(actor: Actor, user: User) -> None:
    if actor.user_id is None or actor.user_id != user.pk:
        actor.require_everywhere(Role.ADMIN)


def _one_time(user: User) -> str:
    password = secrets.token_urlsafe(12)
    user.set_password(password)
    user.must_change_password = True
    return password


def _limit(hosts: Iterable[str], held: Iterable[str], wrong: dict[str, str]) -> list[str]:
    """The hosts as they are kept; where there is no such host, ``wrong`` gets the sentence."""
    try:
        return scopes.checked(hosts, held=held)
    except InvalidError as error:
        wrong.update(error.fields)
        return list(held)


def _values(user: User, wanted: dict[str, Any], wrong: dict[str, str]) -> dict[str, Any]:
    """The columns that really change, with their new values."""
    changeable = ("role", "hosts", "email", "is_active")
    values = {name: wanted[name] for name in changeable if wanted.get(name) is not None}
    if "role" in values:
        values["role"] = values["role"].label
    if "hosts" in values:
        values["hosts"] = _limit(values["hosts"], user.hosts, wrong)
    if "email" in values:
        values["email"] = values["email"].strip()
    return {name: value for name, value in values.items() if getattr(user, name) != value}


def _what(values: dict[str, Any]) -> str:
    if values.keys() == {"is_active"}:
        return "user activated" if values["is_active"] else "user deactivated"
    return "user changed"


def _locked_admins() -> list[User]:
    """The admins who can sign in, so that none of them changes before the transaction ends."""
    return list(
        User.objects.select_for_update()
        .filter(role=Role.ADMIN.label, is_active=True, source=User.Source.LOCAL)
        .order_by("pk")
    )


def _keep_an_admin(admins: list[User], changed: User) -> None:
    """Raises InvalidError where nobody would be left who may add and change users: an account of a directory does not
    count, as that may be away.
    """
    others = any(not admin.hosts for admin in admins if admin.pk != changed.pk)
    is_local = changed.source == User.Source.LOCAL
    stays = is_local and changed.is_active and changed.role == Role.ADMIN.label and not changed.hosts
    if not others and not stays and any(not admin.hosts for admin in admins):
        told = _("{changed} is the last active local admin of all hosts. Make another user one first.")
        raise InvalidError(told.format(changed=changed.username), code="last_admin")


def check_user(user: User) -> None:
    """Raises InvalidError where a column cannot hold what is in it."""
    require_right(_faults(user))


def _faults(user: User) -> dict[str, str]:
    """What is wrong with columns that cannot hold what is in them."""
    try:
        user.clean_fields(exclude=["password"])
    except ValidationError as error:
        return {name: " ".join(texts) for name, texts in error.message_dict.items()}
    return {}


def _shown(user: User) -> dict[str, Any]:
    return {"role": user.role, "hosts": user.hosts, "email": user.email}


def _taken(username: str) -> str:
    return _("A user named {username} already exists. Choose another name.").format(username=username)
