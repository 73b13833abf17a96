"""Key pairs for hosts that are reached by ssh: created here, and kept until a host is saved with them.

Between two steps an operator installs the public key on the host. Until then a pair belongs to who created it and to
the place that it was created for: the same form in another tab, reloaded or a day later, finds the same pair.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent.protocol import HostError
from storage_admin.errors import InvalidError, UnconfirmedError
from storage_admin.hosts import addresses, forced, secrets
from storage_admin.hosts.models import KeyPair
from storage_admin.hosts.registration import DEFAULT_PORT

#: How long a pair waits for its host.
LASTS = timedelta(days=7)


def for_place(actor: Actor, address: str, port: object) -> KeyPair | None:
    """The actor's unused pair for an SSH server, created where there is none; ``None`` where there is no such place.

    Args:
        address, port: as typed.

    Raises:
        ForbiddenError: the actor may not add hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    try:
        place = {"address": addresses.address(address), "port": addresses.port(port, DEFAULT_PORT)}
    except InvalidError:
        return None  # who checks the other fields as well names them all
    pair = KeyPair.objects.filter(owner=actor.name, **place).first()
    if pair is not None and _can_be_used(pair):
        return pair
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with transaction.atomic():
        if pair is not None:
            pair.delete()
        made = {"public_key": public, "private_key_locked": secrets.lock(text)}
        new, is_new = KeyPair.objects.get_or_create(owner=actor.name, **place, defaults=made)
        new.is_new = is_new
        if is_new:
            audit(actor, "key pair created", new, after={"fingerprint": addresses.fingerprint(public)})
    return new


def _can_be_used(pair: KeyPair) -> bool:
    with contextlib.suppress(HostError):  # the key of the secrets is another one now
        return pair.created > timezone.now() - LASTS and bool(secrets.unlock(pair.private_key_locked))
    return False


@contextlib.contextmanager
def used(pair: KeyPair | None, *, is_pinned: bool, is_forced: bool = False) -> Iterator[str]:
    """The private key, to save a host with. Then the pair is the host's alone; after an error it waits.

    Args:
        is_pinned: the host's key is known, so that nobody is going to be asked for it.

    Raises:
        UnconfirmedError: nobody has seen the public key yet. It has that, as has one that is raised inside.
    """
    if pair is None:
        yield ""
        return
    try:
        if pair.is_new and is_pinned:
            sentence = _(
                "A key pair was created. Add the public key to the authorized_keys file on {address}, then try again."
            )
            raise UnconfirmedError(sentence.format(address=pair.address), {}, "key_pair_created")
        yield secrets.unlock(pair.private_key_locked)
    except UnconfirmedError as error:
        line = forced.authorized_line(pair.public_key) if is_forced else forced.named(pair.public_key)
        error.shown |= {"public_key": forced.named(pair.public_key), "authorized_keys": line}
        raise
    pair.delete()


def forget_old() -> None:
    """Removes pairs that waited too long for their host."""
    KeyPair.objects.filter(created__lte=timezone.now() - LASTS).delete()
