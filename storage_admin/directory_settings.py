"""Settings of LDAP as django-auth-ldap reads them, made of a few environment variables."""

import json
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import ldap
from django.core.exceptions import ImproperlyConfigured
from django_auth_ldap import config

#: Seconds that a directory has for an answer.
PATIENCE = 5
GROUP_TYPES = {
    "groupOfNames": config.GroupOfNamesType,
    "nestedGroupOfNames": config.NestedGroupOfNamesType,
    "groupOfUniqueNames": config.GroupOfUniqueNamesType,
    "posixGroup": config.PosixGroupType,
    "activeDirectory": config.ActiveDirectoryGroupType,
    "nestedActiveDirectory": config.NestedActiveDirectoryGroupType,
}


def groups(text: str) -> Any:
    """``SIGN_IN_GROUPS`` as it is read; what it says, ``accounts/directory.py`` checks.

    Raises:
        ImproperlyConfigured: it is no JSON.
    """
    try:
        return json.loads(text or "{}")
    except ValueError:
        raise ImproperlyConfigured("SIGN_IN_GROUPS is no JSON: see docs/access.md.") from None


def ldap_settings(env: Any, url: str, attributes: list[str]) -> dict[str, Any]:
    """The settings ``AUTH_LDAP_…``.

    Args:
        attributes: what is asked for about somebody.

    Raises:
        ImproperlyConfigured: passwords would go over the network in clear, or the kind of groups is not known.
    """
    kind = env.str("LDAP_GROUP_TYPE", default="") or "groupOfNames"
    if kind not in GROUP_TYPES:
        raise ImproperlyConfigured(f"LDAP_GROUP_TYPE is none of {', '.join(GROUP_TYPES)}.")
    asked_for = env.str("LDAP_START_TLS", default="")  # empty in a stack where nobody says anything of it
    start_tls = env.bool("LDAP_START_TLS") if asked_for else url.startswith("ldap://")
    if not start_tls:
        require_tls("LDAP_URL", url)
    options = {
        ldap.OPT_NETWORK_TIMEOUT: PATIENCE, ldap.OPT_TIMEOUT: PATIENCE, ldap.OPT_REFERRALS: 0,
        ldap.OPT_X_TLS_REQUIRE_CERT: ldap.OPT_X_TLS_DEMAND,
    }  # fmt: skip
    if authority := env.str("LDAP_CA", default=""):
        options[ldap.OPT_X_TLS_CACERTFILE] = authority
    options[ldap.OPT_X_TLS_NEWCTX] = 0  # the last one: has the others hold
    people, groups = env.str("LDAP_USER_BASE", default=""), env.str("LDAP_GROUP_BASE", default="")
    if url and not (people and groups):
        raise ImproperlyConfigured("LDAP_URL needs LDAP_USER_BASE and LDAP_GROUP_BASE.")
    who = env.str("LDAP_USER_FILTER", default="") or "(uid=%(user)s)"
    which = env.str("LDAP_GROUP_FILTER", default="") or "(objectClass=*)"
    return {
        "AUTH_LDAP_SERVER_URI": url,
        "AUTH_LDAP_START_TLS": start_tls,
        "AUTH_LDAP_BIND_DN": env.str("LDAP_BIND_DN", default=""),
        "AUTH_LDAP_BIND_PASSWORD": env.str("LDAP_BIND_PASSWORD", default=""),
        "AUTH_LDAP_CONNECTION_OPTIONS": options,
        "AUTH_LDAP_USER_SEARCH": config.LDAPSearch(people, ldap.SCOPE_SUBTREE, who, attributes),
        "AUTH_LDAP_GROUP_SEARCH": config.LDAPSearch(groups, ldap.SCOPE_SUBTREE, which),
        "AUTH_LDAP_GROUP_TYPE": GROUP_TYPES[kind](),
        "AUTH_LDAP_ALWAYS_UPDATE_USER": False,
    }


def require_tls(name: str, url: str) -> None:
    """Raises ImproperlyConfigured where what goes to that address could be read or changed on the way."""
    parts = urlsplit(url)
    if not url or parts.scheme in {"https", "ldaps", "ldapi"} or _is_here(parts.hostname or ""):
        return
    raise ImproperlyConfigured(f"{name} has to begin with https:// or ldaps:// (or, of LDAP, have LDAP_START_TLS=1).")


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
