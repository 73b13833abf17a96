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
    kinds = serializers.ListField(
        child=serializers.CharField(), help_text=_("Kinds of jobs that policies never start on this host.")
    )
    mended_by = serializers.CharField()


class HostSerializer(serializers.ModelSerializer[Host]):
    """A host with the results of its last scan."""

    capabilities = serializers.DictField(
        read_only=True, help_text=_("Tools and features that the agent found on the host, by name.")
    )

    qemu_bugs = serializers.SerializerMethodField(
        help_text=_(
            "Known bugs of the host's QEMU that corrupt disks. A bug also counts as present if its fix is not "
            "confirmed."
        )
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
                "help_text": "Default limit of a rewriting job in bytes per second; null for no limit."
            },
            "idle_io": {"help_text": "Default I/O priority of rewriting jobs is idle; a job can override it."},
            "owners_unknown": {"help_text": "Why it is unknown which guests use which images; empty if it is known."},
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
    address = StrictText(
        max_length=300, required=False, help_text=_("Hostname or IP address. The connection is tested before saving.")
    )
    port = StrictInteger(required=False)
    user = StrictText(max_length=64, required=False)
    private_key = StrictText(
        max_length=20_000, required=False, trim_whitespace=False, write_only=True, allow_blank=True,
        help_text=_("New private key of the dashboard; empty for the keys of the user that the dashboard runs as."),
    )  # fmt: skip
    create_key = StrictBoolean(required=False, help_text=_("Create a new key pair, as for a new host."))
    host_key = StrictText(max_length=2000, required=False, help_text=_("New public key that the host must present."))
    token_id = StrictText(
        max_length=200,
        required=False,
        help_text=_("Proxmox VE only, as are token_secret, tls_fingerprint and ssh_port."),
    )
    token_secret = StrictText(max_length=200, required=False, write_only=True)
    tls_fingerprint = StrictText(max_length=100, required=False, allow_blank=True)
    ssh_port = StrictInteger(
        required=False,
        allow_null=True,
        help_text=_("SSH port of a Proxmox VE node. With host_key, the node is also connected by SSH from now on."),
    )
    ca_cert = StrictText(max_length=100_000, required=False, trim_whitespace=False, help_text="For libvirt over TLS.")
    client_cert = StrictText(max_length=100_000, required=False, trim_whitespace=False)
    client_key = StrictText(max_length=100_000, required=False, trim_whitespace=False, write_only=True)


def _optional(max_length: int, **more: Any) -> StrictText:
    """A text that may be left out, and may be empty."""
    return StrictText(max_length=max_length, required=False, default="", allow_blank=True, **more)


class NewHostBody(Body):
    """A host that is connected over a network."""

    name = StrictText(max_length=200, help_text=_("Display name."))
    kind = serializers.ChoiceField(
        choices=["ssh", "libvirt", "proxmox"], default="ssh",
        help_text="ssh: by SSH; libvirt: through libvirt only, over TLS or SSH (see transport); proxmox: a Proxmox VE "
        "node by its API, and also by SSH if host_key is given.",
    )  # fmt: skip
    address = StrictText(max_length=300, help_text=_("Hostname or IP address."))
    port = StrictInteger(
        required=False, allow_null=True, default=None,
        help_text=_("Default: 22 for SSH, 16514 for libvirt over TLS, 8006 for Proxmox VE."),
    )  # fmt: skip
    user = StrictText(max_length=64, default="root", help_text=_("Users other than root need passwordless sudo."))
    private_key = _optional(
        20_000, trim_whitespace=False, write_only=True,
        help_text="Private key of the dashboard, without a passphrase. Encrypted at rest and never shown again. "
        "Default: the keys of the user that the dashboard runs as.",
    )  # fmt: skip
    create_key = StrictBoolean(
        required=False, default=False,
        help_text="Instead of private_key: the dashboard creates a key pair. The first response (409, "
        "host_key_unconfirmed, or key_pair_created if host_key was given) contains its public_key and the line "
        "for authorized_keys. Add that line on the host, then send the same request again.",
    )  # fmt: skip
    host_key = _optional(
        2000,
        help_text="Public key that the host must present, as in a .pub file. Without it, the response (409, "
        "host_key_unconfirmed) contains the key that the host presents. Compare it, then send it.",
    )
    forced = StrictBoolean(
        required=False, default=False, help_text=_("The key can only run the agent there (a forced command).")
    )
    token_id = _optional(200, help_text="USER@REALM!NAME.")
    token_secret = _optional(200, write_only=True)
    tls_fingerprint = _optional(
        100, help_text=_("SHA-256 fingerprint of a node's certificate; required unless a trusted CA signed it.")
    )
    node = _optional(100, help_text=_("Name of a node of the cluster. Default: the node that answers."))
    ssh_port = StrictInteger(
        required=False, allow_null=True, default=None, help_text=_("SSH port of a Proxmox VE node.")
    )
    transport = serializers.ChoiceField(
        choices=["tls", "ssh"],
        default="tls",
        help_text="libvirt only: connect over TLS, or to its local socket over SSH.",
    )
    ca_cert = _optional(
        100_000, trim_whitespace=False,
        help_text="For libvirt over TLS: certificate of the CA that signed the host's certificate, in PEM form. "
        "Without ca_cert, client_cert and client_key, the files in pki/ of the data folder are used, or libvirt's "
        "usual ones.",
    )  # fmt: skip
    client_cert = _optional(
        100_000, trim_whitespace=False, help_text=_("Client certificate of the dashboard, in PEM form.")
    )
    client_key = _optional(
        100_000, trim_whitespace=False, write_only=True,
        help_text=_("Private key of client_cert, without a passphrase. Encrypted at rest and never shown again."),
    )  # fmt: skip
