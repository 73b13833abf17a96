"""Hosts as the API shows them."""

from rest_framework import serializers

from storage_admin.api.fields import Body, StrictBoolean, StrictInteger, StrictText
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import LEAST_BANDWIDTH


class HostSerializer(serializers.ModelSerializer[Host]):
    """A hypervisor, and what the last scan found out about it."""

    capabilities = serializers.DictField(read_only=True, help_text="What the agent found there, by name.")

    class Meta:
        model = Host
        fields = (
            "id", "slug", "name", "kind", "address", "port", "user", "transport", "cluster", "status", "status_detail",
            "last_seen", "capabilities", "max_jobs", "bandwidth_bytes_sec", "idle_io", "owners_unknown",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "bandwidth_bytes_sec": {
                "help_text": "A rewriting job's limit where it has none of its own; null for none."
            },
            "idle_io": {"help_text": "Rewriting jobs that say nothing else only use the disk when nobody else does."},
            "owners_unknown": {"help_text": "Why it is not known which guests use which images; empty where it is."},
        }


class HostBody(Body):
    """What an admin decides of a host."""

    name = StrictText(max_length=200, required=False)
    max_jobs = StrictInteger(required=False, min_value=1, max_value=64, help_text="Rewriting jobs at once.")
    bandwidth_bytes_sec = StrictInteger(
        required=False, allow_null=True, min_value=LEAST_BANDWIDTH,
        help_text="At most so many bytes a second for a rewriting job that does not say otherwise; null for no limit.",
    )  # fmt: skip
    idle_io = StrictBoolean(required=False, help_text="Rewriting jobs only use the disk when nobody else does.")
