"""Jobs, their logs, kinds and plans as the API shows them."""

import shlex
from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from storage_admin.accounts.models import Role
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job, JobLog
from storage_admin.rest.fields import Body, StrictBoolean, StrictInteger, StrictText
from storage_admin.rest.shown import Shown

#: What a job can work on, by the name of the body's key.
TARGETS = ("image", "host", "pool", "guest", "job")


MOMENT = serializers.DateTimeField()


@extend_schema_field({"type": ["integer", "null"]})
class TargetId(serializers.Field[Any, Any, "int | None", Job]):
    """Read only: the id of what a job works on, where that is what the field is called; else null."""

    def __init__(self, **options: Any) -> None:
        super().__init__(source="*", read_only=True, **options)

    def to_representation(self, job: Job) -> int | None:
        return job.target_id if job.target_kind == self.field_name else None


class RefusalSerializer(serializers.Serializer[Any]):
    """Why something is not done: a code, and a sentence that says what to do."""

    code = serializers.CharField()
    detail = serializers.CharField()


class AffectedSerializer(serializers.Serializer[Any]):
    """An image or a guest that a job touches or depends on."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    how = serializers.CharField(allow_blank=True)


class CauseSerializer(serializers.Serializer[Any]):
    """Why space that a running guest frees does not become free on its host."""

    code = serializers.CharField()
    sentence = serializers.CharField()
    mend = serializers.CharField(help_text=_("What to do about it."))
    disk = serializers.CharField(allow_blank=True, help_text=_("Target of the disk; empty for the whole guest."))
    stops = serializers.BooleanField(help_text=_("Whether a trim frees no space at all because of this cause."))


class LastBackupSerializer(serializers.Serializer[Any]):
    """The newest backup of a guest that is known and can be used."""

    guest = serializers.CharField(help_text=_("Name and number of the guest; the number alone if it is gone."))
    at = serializers.DateTimeField(allow_null=True, help_text=_("Null if no backup is known, see `detail`."))
    volume = serializers.CharField(allow_blank=True, help_text=_("Name of the backup on its storage."))
    included = serializers.BooleanField(
        allow_null=True,
        help_text=_("Whether the backup contains the disk (of a guest: all its disks); null if this is not known."),
    )
    detail = serializers.CharField(allow_blank=True, help_text=_("Why none is known, or what this one may lack."))


class PlanSerializer(serializers.Serializer[Any]):
    """What a job would do, from the database alone; sizes in bytes, null where it is not known yet."""

    method = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    commands = serializers.ListField(child=serializers.CharField())
    facts_at = serializers.DateTimeField(allow_null=True, help_text=_("When the facts behind the plan were scanned."))
    before_bytes = serializers.IntegerField(allow_null=True)
    predicted_after_bytes = serializers.IntegerField(allow_null=True)
    predicted_low = serializers.IntegerField(allow_null=True)
    predicted_high = serializers.IntegerField(allow_null=True)
    won_bytes = serializers.IntegerField(allow_null=True, help_text=_("For a reclaim: the space that it would free."))
    predicted_seconds = serializers.IntegerField(
        allow_null=True, help_text=_("Estimate from the speed of recent jobs of this kind.")
    )
    predicted_seconds_low = serializers.IntegerField(allow_null=True)
    predicted_seconds_high = serializers.IntegerField(allow_null=True)
    scratch_bytes = serializers.IntegerField(
        allow_null=True, help_text="Most space that the job needs while it runs, in scratch_pool."
    )
    scratch_pool = serializers.IntegerField(
        allow_null=True, help_text="Id of the pool in which the new file is created."
    )
    lasting_bytes = serializers.IntegerField(
        allow_null=True, help_text=_("The part of the scratch space that is still in use after the job.")
    )
    undo_bytes = serializers.IntegerField(
        allow_null=True, help_text=_("Bytes that the undo copy would hold until it is removed.")
    )
    refusals = RefusalSerializer(many=True)
    by_hand = RefusalSerializer(many=True, help_text=_("Reasons why policies never run this job, although a user may."))
    warnings = serializers.ListField(child=serializers.CharField())
    causes = CauseSerializer(many=True, help_text=_("Of a trim: why less becomes free than the guest frees."))
    affected_images = AffectedSerializer(many=True)
    affected_guests = AffectedSerializer(many=True)
    backups = LastBackupSerializer(
        many=True,
        help_text=_("Last backups of the guests whose data the job deletes or rewrites, the least helpful first."),
    )
    options = serializers.DictField(help_text=_("The options, including defaults."))


class UndoSerializer(serializers.Serializer[Any]):
    """A finished job's undo copy."""

    available = serializers.BooleanField()
    expires = serializers.DateTimeField(allow_null=True)
    bytes = serializers.IntegerField(help_text=_("Bytes that the copy holds and that are therefore not free."))
    state = serializers.ChoiceField(choices=Job.UndoState.choices)


class JobSerializer(Shown, serializers.ModelSerializer[Job]):
    """One piece of work on a host."""

    host_name = serializers.CharField(source="host.name", read_only=True)
    image = TargetId()
    guest = TargetId()
    pool = TargetId()
    job = TargetId(help_text=_("The job that this job undoes, or whose undo copy it removes."))
    options = serializers.DictField(read_only=True)
    plan = serializers.DictField(
        read_only=True, help_text="The plan when the job was submitted; see the answer to a dry run."
    )
    result = serializers.DictField(read_only=True, allow_null=True)
    commands = serializers.SerializerMethodField()
    error = serializers.SerializerMethodField()
    undo = serializers.SerializerMethodField()

    class Meta:
        model = Job
        fields = (
            "id", "kind", "state", "waiting_for", "stalled_since", "progress", "stage", "message", "done_bytes",
            "total_bytes", "bytes_per_sec", "eta_seconds", "commands", "host", "host_name", "image", "guest", "pool",
            "job", "target_kind", "target_id", "target_label", "options", "plan", "result", "error", "created_by",
            "created", "started", "finished", "cancel_requested", "rewrites", "undo",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field({"type": "array", "items": {"type": "string"}})
    def get_commands(self, job: Job) -> list[str]:
        """What was run on the host, as it would be typed."""
        return [shlex.join(run["argv"]) for run in job.commands]

    @extend_schema_field(RefusalSerializer(allow_null=True))
    def get_error(self, job: Job) -> dict[str, str] | None:
        return {"code": job.error_code, "detail": job.error_detail} if job.error_code else None

    @extend_schema_field(UndoSerializer)
    def get_undo(self, job: Job) -> dict[str, Any]:
        return {
            "available": job.undo_available,
            "expires": None if job.undo_expires is None else MOMENT.to_representation(job.undo_expires),
            "bytes": job.undo_bytes,
            "state": job.undo_state,
        }


class JobLogSerializer(serializers.ModelSerializer[JobLog]):
    """One line of a job's log. ``seq`` only grows: ``?after=`` continues behind it."""

    seq = serializers.IntegerField(source="id", read_only=True)

    class Meta:
        model = JobLog
        fields = ("seq", "at", "level", "text")
        read_only_fields = fields


class JobKindSerializer(serializers.Serializer[JobKind]):
    """A kind of job and the options that it takes."""

    name = serializers.CharField()
    title = serializers.CharField()
    description = serializers.CharField()
    target = serializers.ChoiceField(choices=TARGETS, help_text="The key in a submission that names the target.")
    rewrites = serializers.BooleanField()
    options_schema = serializers.DictField(help_text=_("JSON Schema of the options, with defaults."))
    roles = serializers.SerializerMethodField(help_text=_("Roles that may submit this kind."))

    def get_roles(self, kind: JobKind) -> list[str]:
        return [role.label for role in Role if role >= kind.role]


class Secret(StrictText):
    """A passphrase as it is typed, spaces at its ends included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"trim_whitespace": False, "allow_blank": True} | options))


class SecretsBody(Body):
    """The passphrases that a job waits for, by name."""

    secrets = serializers.DictField(child=Secret(), write_only=True)


class JobBody(Body):
    """A submission: the kind, the one target that it works on, and its options."""

    kind = StrictText(max_length=30)
    image = StrictInteger(required=False, min_value=1)
    host = StrictInteger(required=False, min_value=1)
    pool = StrictInteger(required=False, min_value=1)
    guest = StrictInteger(required=False, min_value=1)
    job = StrictInteger(required=False, min_value=1)
    options = serializers.DictField(required=False)
    secrets = serializers.DictField(
        child=Secret(),
        required=False,
        write_only=True,
        help_text=_(
            "Passphrases that the kind needs, by name. They are encrypted, kept for at most 15 minutes, and forgotten "
            "when the job starts. Without them the job waits for `jobs/{id}/secrets/`."
        ),
    )
    dry_run = StrictBoolean(required=False, default=False, help_text=_("Return the plan and do nothing."))


class UndoBody(Body):
    """``force``: also if something was written since, which is lost then (admin)."""

    force = StrictBoolean(required=False, default=False)


class EmptyBody(Body):
    """Nothing: the address says it all."""
