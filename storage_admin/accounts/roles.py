"""Who acts, and what they may do. Services ask an :class:`Actor`; what is not allowed is denied."""

from dataclasses import dataclass, field
from enum import IntEnum

from django.utils.translation import gettext as _


class Role(IntEnum):
    """Each role may do all that the ones below it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role":
        """The role of that name.

        Raises:
            ValueError: there is none.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(_("{name!r} is no role: choose viewer, operator or admin.").format(name=name)) from None

    @property
    def label(self) -> str:
        return self.name.lower()


ROLE_CHOICES = [(role.label, role.label.capitalize()) for role in Role]


class ForbiddenError(Exception):
    """The actor's role or host scope does not allow it; the argument is a sentence for them."""


@dataclass(frozen=True)
class Actor:
    """A user in a browser, a token, or the scheduler.

    Args:
        name: as it stands in the audit trail.
        hosts: slugs that a user or token is limited to; ``None`` means every host.
        address: where the request came from, for the audit trail.
    """

    name: str
    role: Role
    hosts: frozenset[str] | None = None
    user_id: int | None = None
    token_id: int | None = None
    address: str | None = field(default=None, compare=False)

    def require(self, role: Role, host: str | None = None) -> None:
        """Lets the call go on.

        Args:
            host: slug of the host that it touches, when it touches one.

        Raises:
            ForbiddenError: the role is too low, or the host outside of the actor's scope.
        """
        if self.role < role:
            raise ForbiddenError(
                _("This needs the role {label}; {name} has the role {role_label}.").format(
                    label=role.label, name=self.name, role_label=self.role.label
                )
            )
        if host is not None and not self.sees(host):
            raise ForbiddenError(_("{who} is limited to other hosts than {host}.").format(who=self._named, host=host))

    def require_everywhere(self, role: Role) -> None:
        """Lets the call go on if it concerns no single host: tokens, users, the audit trail.

        Raises:
            ForbiddenError: the role is too low, or the actor is limited to some hosts.
        """
        self.require(role)
        if self.hosts is not None:
            raise ForbiddenError(
                _("{who} is limited to some hosts; this needs access to all hosts.").format(who=self._named)
            )

    @property
    def _named(self) -> str:
        return self.name if self.token_id is None else f"The {self.name}"

    def sees(self, host: str) -> bool:
        """Whether things on the host of that slug exist for this actor."""
        return self.hosts is None or host in self.hosts


#: What the scheduler and the dashboard itself do.
SYSTEM = Actor(name="system", role=Role.ADMIN)
