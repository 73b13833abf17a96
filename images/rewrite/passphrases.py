"""What libvirt keeps of passphrases: the secrets that guests open their encrypted disks with."""

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job, JobLog


def of_guests(host: Host, path: str) -> list[str]:
    """The passphrases by which libvirt opens an image for guests, as far as it tells them.

    Raises:
        RefusedError: ``guests_unknown``: libvirt does not answer.
    """
    if why_read_only(host):
        return []
    try:
        found = control.secrets(host, path)
    except HostError as error:
        raise RefusedError("guests_unknown", error.detail) from error
    return [one.value for one in found if one.value is not None]


def tell(job: Job, path: str, passphrase: str, *, was: str | None = None, define: bool) -> None:
    """Gives the secrets of guests on an image another passphrase, which opens it by now. What came of it is logged.

    Args:
        was: the one that a secret has to have for that; others are left.
        define: make one where no guest names any.
    """
    if why := why_read_only(job.host):
        if define:
            claims.log(job, why, JobLog.Level.WARNING)
        return
    try:
        told = control.secrets(job.host, path, set_to=passphrase, was=was, define=define)
    except HostError as error:
        failed = _("The passphrase was not given to libvirt: {why}").format(why=error.detail)
        claims.log(job, failed, JobLog.Level.WARNING)
        return
    for one in told:
        who = f" of guest {one.guest}" if one.guest else ""
        if one.left:
            claims.log(job, f"libvirt's secret {one.uuid}{who} was left: {one.left}", JobLog.Level.WARNING)
        else:
            claims.log(job, f"libvirt's secret {one.uuid}{who} has the new passphrase")
