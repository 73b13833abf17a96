"""Hosts as the API shows them."""

from rest_framework import serializers

from storage_admin.api.fields import Body, StrictInteger, StrictText
from storage_admin.hosts.models import Host


class HostSerializer(serializers.ModelSerializer[Host]):
    """A hypervisor, and what the last scan found out about it."""

    capabilities = serializers.DictField(read_only=True, help_text="What the agent found there, by name.")

    class Meta:
        model = Host
        fields = (
            "id", "slug", "name", "kind", "address", "port", "user", "transport", "cluster", "status", "status_detail",
            "last_seen", "capabilities", "max_jobs", "owners_unknown",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "owners_unknown": {"help_text": "Why it is not known which guests use which images; empty where it is."},
        }


class HostBody(Body):
    """What an admin decides of a host."""

    name = StrictText(max_length=200, required=False)
    max_jobs = StrictInteger(required=False, min_value=1, max_value=64, help_text="Rewriting jobs at once.")
