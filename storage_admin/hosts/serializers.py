"""Hosts as the API shows them."""

from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from storage_admin.hosts import qemu_bugs
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import LEAST_BANDWIDTH
from storage_admin.rest.fields import Body, StrictBoolean, StrictInteger, StrictText


class QemuBugSerializer(serializers.Serializer[Any]):
    """A bug of QEMU that corrupts disks while a guest runs."""

    code = serializers.CharField()
    detail = serializers.CharField()
    kinds = serializers.ListField(child=serializers.CharField(), help_text=_("Jobs that policies never start there."))
    mended_by = serializers.CharField()


class HostSerializer(serializers.ModelSerializer[Host]):
    """A hypervisor, and what the last scan found out about it."""

    capabilities = serializers.DictField(read_only=True, help_text=_("What the agent found there, by name."))

    qemu_bugs = serializers.SerializerMethodField(
        help_text=_("Known bugs of its QEMU that corrupt disks; what is not known to be mended counts as having them.")
    )

    class Meta:
        model = Host
        fields = (
            "id", "slug", "name", "kind", "address", "port", "user", "transport", "cluster", "status", "status_detail",
            "last_seen", "capabilities", "qemu_bugs", "max_jobs", "bandwidth_bytes_sec", "idle_io", "owners_unknown",
            "host_key",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "bandwidth_bytes_sec": {
                "help_text": "A rewriting job's limit where it has none of its own; null for none."
            },
            "idle_io": {"help_text": "Default I/O priority of rewriting jobs is idle; a job can override it."},
            "owners_unknown": {"help_text": "Why it is not known which guests use which images; empty where it is."},
        }

    @extend_schema_field(QemuBugSerializer(many=True))
    def get_qemu_bugs(self, host: Host) -> list[dict[str, Any]]:
        """Code, sentence, kinds of jobs that provoke it, and what mends it."""
        return [
            {"code": bug.code, "detail": bug.what, "kinds": sorted(bug.kinds), "mended_by": cure}
            for bug, cure in qemu_bugs.of_host(host)
        ]


class HostBody(Body):
    """Settings of a host."""

    name = StrictText(max_length=200, required=False)
    max_jobs = StrictInteger(
        required=False, min_value=1, max_value=64, help_text=_("Maximum number of concurrent rewriting jobs.")
    )
    bandwidth_bytes_sec = StrictInteger(
        required=False, allow_null=True, min_value=LEAST_BANDWIDTH,
        help_text="Default limit of a rewriting job in bytes per second; null for no limit. A job can "
        "override it.",
    )  # fmt: skip
    idle_io = StrictBoolean(required=False, help_text=_("Idle I/O priority for rewriting jobs."))
    address = StrictText(max_length=300, required=False, help_text=_("Of an SSH host; the connection is tested."))
    port = StrictInteger(required=False)
    user = StrictText(max_length=64, required=False)
    private_key = StrictText(
        max_length=20_000, required=False, trim_whitespace=False, write_only=True, allow_blank=True,
        help_text=_("Another key of ours; empty for those of the user that the dashboard runs as."),
    )  # fmt: skip
    create_key = StrictBoolean(required=False, help_text=_("As for a new host: another key pair of ours."))
    host_key = StrictText(max_length=2000, required=False, help_text=_("Another public key that the host has to show."))
    token_id = StrictText(max_length=200, required=False, help_text=_("Of a node of Proxmox VE, as what follows."))
    token_secret = StrictText(max_length=200, required=False, write_only=True)
    tls_fingerprint = StrictText(max_length=100, required=False, allow_blank=True)
    ssh_port = StrictInteger(
        required=False, allow_null=True, help_text=_("With host_key: the node is reached by ssh as well from now on.")
    )
    ca_cert = StrictText(max_length=100_000, required=False, trim_whitespace=False, help_text="For libvirt over TLS.")
    client_cert = StrictText(max_length=100_000, required=False, trim_whitespace=False)
    client_key = StrictText(max_length=100_000, required=False, trim_whitespace=False, write_only=True)


class NewHostBody(Body):
    """A host that is connected over a network."""

    name = StrictText(max_length=200, help_text=_("Display name."))
    kind = serializers.ChoiceField(
        choices=["ssh", "libvirt", "proxmox"], default="ssh",
        help_text="ssh; libvirt: by libvirt over TLS alone; proxmox: a node of Proxmox VE by its API, and by ssh where "
        "host_key is given.",
    )  # fmt: skip
    address = StrictText(max_length=300, help_text=_("Hostname or IP address."))
    port = StrictInteger(
        required=False, allow_null=True, default=None,
        help_text=_("22 for ssh, 16514 for libvirt, 8006 for proxmox, where it is not given."),
    )  # fmt: skip
    user = StrictText(max_length=64, default="root", help_text=_("Users other than root need passwordless sudo."))
    private_key = StrictText(
        max_length=20_000, required=False, default="", trim_whitespace=False, write_only=True, allow_blank=True,
        help_text="Ours, without a passphrase. Encrypted at rest and never shown again. Without it, the keys of the "
        "user that the dashboard runs as are tried.",
    )  # fmt: skip
    create_key = StrictBoolean(
        required=False, default=False,
        help_text="Instead of private_key: the dashboard creates a key pair. The first answer (409, "
        "host_key_unconfirmed, or key_pair_created where host_key was given) has its public_key, and the line for "
        "authorized_keys. Install that there, and send the same again.",
    )  # fmt: skip
    host_key = StrictText(
        max_length=2000, required=False, default="", allow_blank=True,
        help_text="The public key that the host has to show, as in a .pub file. Without it, the answer (409, "
        "host_key_unconfirmed) has the one that it shows, to compare and to send back.",
    )  # fmt: skip
    forced = StrictBoolean(
        required=False, default=False, help_text=_("The key can only run the agent there (a forced command).")
    )
    token_id = StrictText(max_length=200, required=False, default="", allow_blank=True, help_text="USER@REALM!NAME.")
    token_secret = StrictText(max_length=200, required=False, default="", allow_blank=True, write_only=True)
    tls_fingerprint = StrictText(
        max_length=100, required=False, default="", allow_blank=True,
        help_text=_("SHA-256 of a node's certificate; needed where no known authority has signed that."),
    )  # fmt: skip
    node = StrictText(
        max_length=100,
        required=False,
        default="",
        allow_blank=True,
        help_text=_("Of a cluster; else the one that answers."),
    )
    ssh_port = StrictInteger(required=False, allow_null=True, default=None, help_text=_("Of a node of Proxmox VE."))
    transport = serializers.ChoiceField(
        choices=["tls", "ssh"], default="tls", help_text="Of kind libvirt: over TLS, or at its own socket through ssh."
    )
    ca_cert = StrictText(
        max_length=100_000, required=False, default="", allow_blank=True, trim_whitespace=False,
        help_text="For libvirt over TLS: the authority that signed the host's certificate, in PEM form. Without the "
        "three, the files in pki/ of the data folder are taken, or libvirt's usual ones.",
    )  # fmt: skip
    client_cert = StrictText(
        max_length=100_000, required=False, default="", allow_blank=True, trim_whitespace=False,
        help_text=_("Our certificate, in PEM form."),
    )  # fmt: skip
    client_key = StrictText(
        max_length=100_000, required=False, default="", allow_blank=True, trim_whitespace=False, write_only=True,
        help_text=_("Its key, without a passphrase. Encrypted at rest and never shown again."),
    )  # fmt: skip
