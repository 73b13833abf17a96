"""Signing in with the password that somebody has in LDAP or Active Directory.

django-auth-ldap finds and proves them. Who is let in, and as what, ``directory.py`` decides.
"""

import threading
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _
from django_auth_ldap.backend import LDAPBackend, ldap_error

from storage_admin.accounts import directory
from storage_admin.accounts.models import User
from storage_admin.accounts.tries import place_in

#: Requests of a process that wait for the directory: one that is slow must not keep local accounts out.
ROOM = 2
_room = threading.BoundedSemaphore(ROOM)


class DirectoryAwayError(Exception):
    """The directory does not answer: nobody's password was right or wrong."""


class LdapBackend(LDAPBackend):  # type: ignore[misc]
    """Never for the name of an account that is not of the directory."""

    def authenticate(
        self, request: Any, username: str | None = None, password: str | None = None, **more: Any
    ) -> User | None:
        """Raises DeniedError, DirectoryAwayError, TooManyTriesError."""
        if not username or not password:
            return None
        if User.objects.filter(username__iexact=username).exclude(source=directory.LDAP).exists():
            return None
        with place_in(_room, 5):
            found: User | None = super().authenticate(request, username=username, password=password, **more)
            return found

    def get_or_build_user(self, username: str, ldap_user: Any) -> tuple[User, bool]:
        """The account; called when the password was right."""
        attributes = ldap_user.attrs
        name = _first(attributes, settings.LDAP_NAME_ATTRIBUTE) or username
        stable = _first(attributes, settings.LDAP_ID_ATTRIBUTE)
        if not stable:
            # Neither a name nor a DN does: both are given to somebody else one day.
            raise directory.DeniedError(
                _("Your directory entry has no {attribute}. Ask an admin.").format(attribute=settings.LDAP_ID_ATTRIBUTE)
            )
        groups = {*ldap_user.group_names, *(dn.lower() for dn in ldap_user.group_dns)}
        email = _first(attributes, "mail")
        return directory.admit(directory.LDAP, stable, name.lower(), groups, email=email), False


def _first(attributes: Any, name: str) -> str:
    values = attributes.get(name) or [""]
    value = values[0]
    # Active Directory's objectGUID is 16 bytes.
    return value.hex() if isinstance(value, bytes) else value if value.isprintable() else value.encode().hex()


def _away(exception: Exception, **_more: Any) -> None:
    raise DirectoryAwayError(
        _("The directory sent an unexpected response: {name}.").format(name=type(exception).__name__)
    )


def listen() -> None:
    """What goes wrong there is no wrong password."""
    ldap_error.connect(_away)
