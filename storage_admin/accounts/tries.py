"""How often somebody may try to sign in, and how many passwords are hashed at once.

Hashing a password takes a third of a second of a core on purpose. Without a limit, a handful of strangers would keep
every core and every thread of the web server busy with it. So an address (of IPv6, its network) has so many tries a
minute, counted before anything is hashed, and each web process hashes one password at a time; a few others wait for
that, and everybody else is told to come back. Each web process counts for itself.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.utils.translation import gettext as _

from storage_admin.accounts import refusals
from storage_admin.accounts.addresses import address_of, tries_of

#: Requests of a process that hash a password or wait for their turn; it has eight threads.
ROOM = 4
#: Addresses that are remembered. Who has more than these meets the limit on hashing.
MOST_ADDRESSES = 10_000
_MINUTE = 60.0


class TooManyTriesError(Exception):
    """Nothing was hashed and nothing looked up: it is to be tried again later.

    Args:
        seconds: after which that makes sense.
    """

    def __init__(self, detail: str, seconds: int) -> None:
        super().__init__(detail)
        self.detail = detail
        self.seconds = seconds


@dataclass
class _Bucket:
    """What an address has left, and when that was; when the trail was told of it last."""

    left: float
    at: float
    told: float = -math.inf


class Tries:
    """So many tries a minute for each address, which come back one by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, address: str) -> tuple[int, bool]:
        """Takes one try of an address.

        Returns:
            The seconds until there is one again, 0 where there was one; and whether that is news for the trail.
        """
        limit, now = settings.SIGN_IN_TRIES_PER_MINUTE, time.monotonic()
        with self._lock:
            bucket = self._buckets.setdefault(address, _Bucket(limit, now))
            self._buckets.move_to_end(address)
            if len(self._buckets) > MOST_ADDRESSES:
                self._buckets.popitem(last=False)
            bucket.left = min(limit, bucket.left + (now - bucket.at) * limit / _MINUTE)
            bucket.at = now
            if bucket.left >= 1:
                bucket.left -= 1
                return 0, False
            is_news = now - bucket.told > _MINUTE
            bucket.told = now if is_news else bucket.told
            return max(1, math.ceil((1 - bucket.left) * _MINUTE / limit)), is_news

    def forget(self) -> None:
        """Every address has all its tries again."""
        with self._lock:
            self._buckets.clear()


tries = Tries()
_room = threading.BoundedSemaphore(ROOM)
_turn = threading.Lock()


class TriesBackend:
    """Comes before all other backends, knows nobody, and stops who tries too often."""

    def authenticate(self, request: Any, **_credentials: Any) -> None:
        """Raises TooManyTriesError."""
        if request is not None:
            count(request)


def count(request: Any) -> None:
    """Takes one try of the address that a request comes from.

    Raises:
        TooManyTriesError: it has none left.
    """
    seconds, is_news = tries.take(tries_of(request) or "")
    if not seconds:
        return
    if is_news:
        why = f"more than {settings.SIGN_IN_TRIES_PER_MINUTE} tries a minute"
        refusals.refused(refusals.NOBODY, "too many sign-ins", "", address=address_of(request), why=why)
    raise TooManyTriesError(_("Too many sign-in attempts from your address."), seconds)


class Hasher(PBKDF2PasswordHasher):
    """Django's own, one at a time in each process."""

    def encode(self, password: str, salt: str, iterations: int | None = None) -> str:
        """Raises TooManyTriesError where too many wait already."""
        with place_in(_room, 3), _turn:
            return super().encode(password, salt, iterations)


@contextmanager
def place_in(room: threading.BoundedSemaphore, seconds: int) -> Iterator[None]:
    """A place among those who wait.

    Raises:
        TooManyTriesError: none is free; it is to be tried again after so many seconds.
    """
    if not room.acquire(blocking=False):
        raise TooManyTriesError(_("Too many sign-ins are in progress."), seconds)
    try:
        yield
    finally:
        room.release()
