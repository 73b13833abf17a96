"""Writes: users and tokens."""

import hashlib
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts import scopes
from storage_admin.accounts.models import SYSTEM, Actor, Role, Token, User, audit
from storage_admin.errors import InvalidError, require_right

#: Secrets start with it, so that a scanner for leaked secrets can find them.
TOKEN_PREFIX = "sa_"  # noqa: S105 (a prefix)
#: Characters of a token's name, which its column has room for.
LONGEST_TOKEN_NAME = 100


def ensure_first_admin() -> str | None:
    """Makes the user ``admin`` with a one-time password if there is no admin yet.

    Returns:
        The password, which has to be changed at the first sign-in, or ``None`` where an admin exists already.
    """
    with transaction.atomic():
        if User.objects.filter(role=Role.ADMIN.label).exists():
            return None
        password = secrets.token_urlsafe(12)
        User.objects.create_user("admin", password=password, role=Role.ADMIN.label, must_change_password=True)
        audit(SYSTEM, "user created", "admin", after={"role": Role.ADMIN.label})
    return password


def forget_host(actor: Actor, slug: str) -> None:
    """A host is removed: what was limited to it is limited to nothing that exists, and not to all that does.

    To be called in the transaction that removes it.

    Args:
        actor: who removes it.
    """
    for model, what in ((User, "user changed"), (Token, "token changed")):
        for row in model.objects.select_for_update().exclude(hosts=[]):
            if slug in row.hosts:
                before, row.hosts = {"hosts": row.hosts}, scopes.without(row.hosts, slug)
                row.save(update_fields=["hosts"])
                audit(actor, what, row, before=before, after={"hosts": row.hosts})


def digest_of(secret: str) -> str:
    """What is kept of a secret. A plain SHA-256 does: secrets are 256 random bits, not something to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_token(
    actor: Actor, name: str, role: Role, *, hosts: Iterable[str] = (), expires: datetime | None = None
) -> tuple[Token, str]:
    """Makes an API token.

    Returns:
        The token and its secret, which is not kept and cannot be shown again.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: the name is empty, taken or cannot be read, there is no such host, or the time has passed; it
            names all fields that are wrong.
    """
    actor.require_everywhere(Role.ADMIN)
    name, limit, wrong = name.strip(), list[str](), dict[str, str]()
    if not name:
        wrong["name"] = _("Enter a name. The audit trail shows it.")
    elif len(name) > LONGEST_TOKEN_NAME or not name.isprintable():
        wrong["name"] = _("Use at most {longest} visible characters.").format(longest=LONGEST_TOKEN_NAME)
    if expires is not None and expires <= timezone.now():
        wrong["expires"] = _("The expiry time is in the past. Choose a later time.")
    try:
        limit = scopes.checked(hosts)
    except InvalidError as error:
        wrong |= error.fields
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        if "name" not in wrong and Token.objects.filter(name=name).exists():
            told = _("A token named {name} already exists. Delete it first, or choose another name.")
            wrong["name"] = told.format(name=name)
        require_right(wrong)
        token = Token.objects.create(
            name=name, digest=digest_of(secret), role=role.label, hosts=limit, expires=expires,
            created_by=actor.name,
        )  # fmt: skip
        audit(actor, "token created", name, after=_shown(token))
    return token, secret


def delete_token(actor: Actor, token: Token) -> None:
    """Takes a token away; what uses it is refused from now on.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        audit(actor, "token deleted", token.name, before=_shown(token))
        token.delete()


def _shown(token: Token) -> dict[str, Any]:
    expires = None if token.expires is None else token.expires.isoformat(timespec="seconds")
    return {"role": token.role, "hosts": token.hosts, "expires": expires}
