"""Addresses of webhooks: which are taken, and how they are shown.

An admin chooses them, and the dashboard goes there: to http and https only, by a POST with our body and headers.
What a URL may carry as a credential (its path and its query) is not shown again. A user and password in it are refused,
because they would end in logs; the signature says who sends.
"""

import glob
import ipaddress
from fnmatch import fnmatchcase
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from django.utils.translation import gettext as _

from storage_admin.errors import InvalidError, of_field

LONGEST = 500
#: Where clouds have their metadata outside of the link-local addresses: AWS by IPv6, Alibaba.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200")))
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: An address of IPv4 in the last 32 bits: compatible and mapped (RFC 4291), translated (RFC 2765), NAT64 (RFC 6052).
_IPV4_AT_THE_END = [
    ipaddress.IPv6Network(f"{prefix}/96") for prefix in ("::", "::ffff:0:0", "::ffff:0:0:0", "64:ff9b::")
]
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # RFC 8215
_6TO4 = ipaddress.IPv6Network("2002::/16")  # RFC 3056
_TEREDO = ipaddress.IPv6Network("2001::/32")  # RFC 4380: the server's address, and the client's with its bits turned
#: How the last 64 bits begin where they end in an address of IPv4 (ISATAP, RFC 5214).
_ISATAP = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))
#: Stands for what is not shown.
HIDDEN = "…"


def checked(url: str) -> str:
    """A webhook's address as it is kept.

    Raises:
        InvalidError: it cannot be one.
    """
    url = url.strip()
    parts = _split(url)
    if HIDDEN in url:
        raise _bad(
            _("Enter the complete URL. {hidden} only stands for the hidden part of the current one.").format(
                hidden=HIDDEN
            )
        )
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise _bad(_("Enter the complete URL, starting with https:// or http://."))
    if parts.username is not None or parts.password is not None:
        raise _bad(
            _(
                "Remove the user name and password: they would be sent and logged in clear text. The receiver can "
                "verify the signature instead."
            )
        )
    if len(url) > LONGEST or not url.isascii() or not url.isprintable() or " " in url:
        raise _bad(
            _(
                "Use at most {longest} ASCII characters without spaces. Encode other characters as %XX, and host "
                "names as xn--…."
            ).format(longest=LONGEST)
        )
    if parts.fragment:
        raise _bad(_("Remove the part after #: it is never sent."))
    if not _is_name(parts.hostname):
        raise _bad(_("Invalid hostname. Use 1 to 63 characters between dots."))
    if forbidden(parts.hostname):
        raise _bad(_("This is a link-local address (such as cloud metadata), which is not allowed."))
    return url


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        __ = parts.port
    except ValueError:
        raise _bad(_("Invalid URL. Check that the port is a number from 1 to 65535.")) from None
    return parts


def _is_name(host: str) -> bool:
    """Whether a name can be looked up at all; an IP address is one, too."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _bad(sentence: str) -> InvalidError:
    return of_field("url", sentence)


def forbidden(host: str) -> bool:
    """Whether an IP address is one that nothing is sent to: link-local, multicast, unspecified. Names are none.

    An address of IPv6 that leads to one of IPv4, by translation or in a tunnel, is what that one is.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(map(_leads_nowhere_else, [address, *_embedded(address)]))


def _leads_nowhere_else(address: _Address) -> bool:
    return address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified


def _embedded(address: _Address) -> list[ipaddress.IPv4Address]:
    """The addresses of IPv4 that one of IPv6 may stand for."""
    if address.version == 4:
        return []
    raw = address.packed
    found = [raw[12:]] if any(address in network for network in _IPV4_AT_THE_END) else []
    if raw[8:12] in _ISATAP:
        found.append(raw[12:])
    if address in _LOCAL_NAT64:
        # Its length is the site's choice (RFC 6052, section 2.2; octet 8 is skipped): what one reading finds to be
        # zeros, is meant by another one.
        readings = [raw[12:], raw[6:8] + raw[9:11], raw[7:8] + raw[9:12], raw[9:13]]
        found += [one for one in readings if any(one)] or readings[:1]
    if address in _6TO4:
        found.append(raw[2:6])
    if address in _TEREDO:
        found += [raw[4:8], bytes(octet ^ 0xFF for octet in raw[12:])]
    return [ipaddress.IPv4Address(one) for one in found]


def server(url: str) -> str:
    """Of an address its scheme, its host and its port alone."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def without(url: str, text: str) -> str:
    """A text, such as a receiver's answer, without what of an address stands behind its server."""
    parts = urlsplit(url)
    told = [f"{parts.path}?{parts.query}", parts.path, parts.query, *(value for __, value in parse_qsl(parts.query))]
    # Who answers may tell a part alone, or write the slashes otherwise; what is short is a word like others.
    told += [part for part in parts.path.split("/") if len(part) > 7]
    for part in told:
        for form in (part, unquote(part)):
            text = text.replace(form, HIDDEN) if len(form) > 3 else text
    return text


def shown(url: str) -> str:
    """An address as it is told: its server, and the names in its query. Many a receiver has its secret in the path, and
    some in the query without a name.
    """
    parts = urlsplit(url)
    path = parts.path if parts.path in {"", "/"} else f"/{HIDDEN}"
    query = "&".join(_shown(part) for part in parts.query.split("&"))
    return f"{server(url)}{path}" + (f"?{query}" if query else "")


def _shown(part: str) -> str:
    name, __, value = part.partition("=")
    # What ends in = may be Base64.
    return f"{name}={HIDDEN}" if value.strip("=") else part and HIDDEN


def stands_for(told: str, url: str) -> bool:
    """Whether an address, as somebody gives it, is this one, with what is not shown of it left out."""
    return fnmatchcase(url, glob.escape(told.strip()).replace(HIDDEN, "?*"))
