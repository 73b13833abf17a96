"""Which hosts somebody may be limited to. This app knows no hosts: the app that does tells it how to ask."""

from collections.abc import Callable, Iterable

from django.utils.translation import gettext as _

from storage_admin.errors import of_field

#: Stands behind the slug of a host that was removed. No slug can look like that, so no host is ever meant by it.
GONE = " (removed)"

_ask: list[Callable[[], dict[str, str]]] = []


def register(ask: Callable[[], dict[str, str]]) -> None:
    """Has ``ask`` tell the hosts there are: their names by their slugs."""
    _ask[:] = [ask]


def names() -> dict[str, str]:
    """The hosts' names by their slugs."""
    return _ask[0]() if _ask else {}


def checked(hosts: Iterable[str], held: Iterable[str] = ()) -> list[str]:
    """Slugs as they are kept, each once, in order.

    Args:
        held: what somebody is limited to already, which may name hosts that are gone.

    Raises:
        InvalidError: there is no such host. It must not pass as a limit that means nothing.
    """
    wanted = sorted(set(hosts))
    known = {*names(), *held}
    if unknown := [slug for slug in wanted if slug not in known]:
        raise of_field("hosts", _("There is no host {unknown}.").format(unknown=unknown[0]))
    return wanted


def without(hosts: Iterable[str], slug: str) -> list[str]:
    """What remains of a limit when a host was removed. It never becomes empty, which would mean every host, and never
    means a host that gets the same slug later.
    """
    return sorted({one + GONE if one == slug else one for one in hosts})
