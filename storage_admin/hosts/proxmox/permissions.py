"""What a token may do: asked before anything else, because Proxmox VE leaves out what a token may not see.

A token without the rights gets a 200 with the images, guests and storages silently missing. So an empty list means
nothing until the rights behind it are known to be there.

The answer of ``/access/permissions`` maps paths to rights, each with 1 where it also counts below that path and 0 where
it does not. It has the top of each tree, every path that an access rule names, and what is in resource pools; a path
whose rights are all taken away is left out, as if it had never been named.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.errors import DeniedError
from storage_admin.words import Translatable

#: Always in the answer, unless there are no rights at all on them.
_TOPS = ("/", "/access", "/access/groups", "/nodes", "/pool", "/sdn", "/storage", "/vms")


@dataclass(frozen=True)
class Need:
    """A right that has to be there.

    Args:
        scope: ``/vms``, ``/storage``, ``/nodes`` or ``/``: it counts for everything below.
        rights: any of these will do.
    """

    scope: str
    rights: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """Something that the dashboard does by the API.

    Args:
        title: after "to", in a sentence.
        needs: all of these.
        instead: or this alone.
    """

    name: str
    title: Translatable
    needs: tuple[Need, ...]
    instead: Need | None = None


_DISKS = Need("/vms", ("VM.Config.Disk",))
_SPACE = Need("/storage", ("Datastore.AllocateSpace",))
_STORAGES = Need("/storage", ("Datastore.Audit", "Datastore.AllocateSpace"))

FEATURES = {
    feature.name: feature
    for feature in (
        Feature("storages", _("see the storages and their space"), (_STORAGES,)),
        Feature("guests", _("see the guests and their disks"), (Need("/vms", ("VM.Audit",)),)),
        Feature(
            "images",
            _("list the images of a storage"),
            (Need("/storage", ("Datastore.Audit",)), _DISKS),
            Need("/storage", ("Datastore.Allocate",)),
        ),
        Feature(
            "backups",
            _("see the last backup of each guest"),
            (_SPACE, Need("/vms", ("VM.Backup",))),
            Need("/storage", ("Datastore.Allocate",)),
        ),
        Feature("cluster", _("see the cluster and its nodes"), (Need("/", ("Sys.Audit",)),)),
        Feature("limits", _("set I/O limits of drives"), (_DISKS,)),
        Feature("flatten", _("rename a flattened disk in its guest's configuration"), (_DISKS,)),
        Feature("move", _("move disks to another storage"), (_DISKS, _SPACE)),
        Feature("resize", _("enlarge disks"), (_DISKS, _SPACE)),
        Feature("snapshot", _("make and delete snapshots of VMs"), (Need("/vms", ("VM.Snapshot",)),)),
        Feature("rollback", _("go back to snapshots"), (Need("/vms", ("VM.Snapshot", "VM.Snapshot.Rollback")),)),
        Feature(
            "trim",
            _("trim a guest's filesystems through its guest agent"),
            # VM.Monitor is what Proxmox VE 8 and older ask for.
            (Need("/vms", ("VM.GuestAgent.FileSystemMgmt", "VM.GuestAgent.Unrestricted", "VM.Monitor")),),
        ),
    )
}
#: Without these it is not known who uses an image.
INVENTORY = ("storages", "guests")


@dataclass(frozen=True)
class MissingRight:
    """A right that a feature needs and the token has not.

    Args:
        path: where it is missing.
        rights: any of these would do.
    """

    feature: str
    path: str
    rights: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What to do about it."""
        return gettext("To {feature}, the API token needs {rights} on {path}.").format(
            feature=FEATURES[self.feature].title, rights=gettext(" or ").join(self.rights), path=self.path
        )


class Permissions:
    """The rights of a token.

    Args:
        tree: as ``/access/permissions`` answers.
    """

    def __init__(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        self._tree = {
            path: {right: str(below) not in ("0", "False") for right, below in rights.items()}
            for path, rights in tree.items()
            if isinstance(rights, Mapping)
        }

    def has(self, path: str, rights: Iterable[str]) -> bool:
        """Whether one of these rights is there on a path."""
        return not set(rights).isdisjoint(self._on(path))

    def _on(self, path: str) -> frozenset[str]:
        exact = self._tree.get(path)
        if exact is not None or path in _TOPS:
            return frozenset(exact or ())
        above = path.rpartition("/")[0] or "/"
        while above not in self._tree and above not in _TOPS:
            above = above.rpartition("/")[0] or "/"
        return frozenset(right for right, below in self._tree.get(above, {}).items() if below)

    def missing(self, feature: str, ids: Iterable[str | int] = ()) -> tuple[MissingRight, ...]:
        """What a feature lacks.

        Args:
            feature: one of :data:`FEATURES`.
            ids: of guests or storages that it is to be done on, besides all those that there are rules for.
        """
        asked = FEATURES[feature]
        if asked.instead is not None and not self._lacks(asked.instead, ids):
            return ()
        return tuple(
            MissingRight(feature, path, need.rights) for need in asked.needs for path in self._lacks(need, ids)
        )

    def _lacks(self, need: Need, ids: Iterable[str | int]) -> list[str]:
        if need.scope == "/":
            return [] if self.has("/", need.rights) else ["/"]
        # It has to count for what lies below, for what is there today and what comes tomorrow.
        if not any(self._tree.get(need.scope, {}).get(right) for right in need.rights):
            return [need.scope]
        ruled = {path for path in self._tree if path.startswith(need.scope + "/")}
        paths = ruled | {f"{need.scope}/{one}" for one in ids}
        return sorted(path for path in paths if not self.has(path, need.rights))

    def all_missing(self) -> tuple[MissingRight, ...]:
        """What all features lack, each feature's in its turn."""
        return tuple(right for name in FEATURES for right in self.missing(name))


def read(client: Api) -> Permissions:
    """The rights of the client's own token; raises as :meth:`Api.get`."""
    return Permissions(client.fields("access", "permissions"))


def denied(client: Api, feature: str, scope: str, ids: Iterable[str]) -> tuple[MissingRight, ...]:
    """Of these guests or storages those that a feature's rights are missing on, each asked for by its path.

    Only that tells of a rule that takes all rights away: Proxmox VE leaves it out of every list, and out of the answer
    about all paths. A path without a rule has what holds above it, whether there is such a thing or not.

    Args:
        scope: ``/storage`` or ``/vms``: where they are.

    Raises:
        HostError: as :meth:`Api.get`.
    """
    found = []
    for need in (need for need in FEATURES[feature].needs if need.scope == scope):
        for one in ids:
            path = f"{need.scope}/{one}"
            if _lacks(client, need, path):
                found.append(MissingRight(feature, path, need.rights))
    return tuple(found)


def require(client: Api, feature: str, *, vmid: int | None = None, storage: str = "") -> None:
    """Makes sure that a feature may be used on one guest and one storage, by their exact rights.

    Raises:
        DeniedError: it names what is missing, where.
        HostError: as :meth:`Api.get`.
    """
    for need in FEATURES[feature].needs:
        path = {"/vms": f"/vms/{vmid}" if vmid else "", "/storage": f"/storage/{storage}" if storage else ""}.get(
            need.scope, need.scope
        )
        if path and _lacks(client, need, path):
            raise DeniedError(MissingRight(feature, path, need.rights).sentence)


def _lacks(client: Api, need: Need, path: str) -> bool:
    rights = client.fields("access", "permissions", params={"path": path}).get(path)
    return not isinstance(rights, dict) or set(need.rights).isdisjoint(rights)
