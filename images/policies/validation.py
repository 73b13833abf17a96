"""Whether a policy makes sense: every field is looked at, and each that does not gets a sentence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.filters import FORMATS
from images.models import Policy
from images.policies.shape import IMAGE_KINDS, KINDS, TARGETS, Rules
from storage_admin.accounts.models import Actor
from storage_admin.errors import InvalidError, of_fields
from storage_admin.hosts.selectors import hosts_for, pools_for
from storage_admin.jobs import kinds

LONGEST_WINDOW = 7 * 24 * 60
#: Numbers: from, to.
BOUNDS = {
    "window_minutes": (1, LONGEST_WINDOW),
    "quiet_minutes": (0, LONGEST_WINDOW),
    "min_reclaimable_bytes": (0, (1 << 63) - 1),
    "min_reclaimable_percent": (0, 100),
    "min_age_hours": (0, 24 * 3650),
    "min_chain_depth": (1, 64),
    "max_jobs_per_host": (1, 100),
    "backup_max_days": (1, 3650),
}
#: Numbers that may be null.
NULLABLE = frozenset({"backup_max_days"})
#: What a policy does not do, whatever its options ask for.
_NEVER = {
    "start_after": (False, _("A policy never starts guests. Leave this out.")),
    "repair": (
        "none leaks",
        _(
            "A policy cannot repair all errors, because that may change what a guest reads. An admin can do it "
            "manually."
        ),
    ),
    "disk": ("", _("This names a single disk, but a policy works on many guests. Leave this out.")),
    "down_to": (None, _("This names a single image, but a policy works on many. Leave this out.")),
    "accept_hidden_lines": (None, _("This names a single configuration. An admin accepts it on the guest's page.")),
}
Fields = dict[str, str]


def clean(policy: Policy, actor: Actor) -> Policy:
    """The policy with its options' defaults.

    What is kept already is not asked for again: a host that was removed since, or a time zone that there is not any
    more, must not keep anybody from switching a policy off.

    Raises:
        InvalidError: it names every field that is wrong.
    """
    fields: Fields = {}
    kept = Policy.objects.filter(pk=policy.pk).first() if policy.pk else None
    _name(policy, fields)
    _names(policy, kept, fields)
    _numbers(policy, fields)
    _places(policy, kept, actor, fields)
    _formats(policy, kept, fields)
    _job(policy, fields)
    _times(policy, kept, fields)
    if fields:
        raise of_fields(fields)
    return policy


def _name(policy: Policy, fields: Fields) -> None:
    policy.name = policy.name.strip()
    if not policy.name or not policy.name.isprintable() or len(policy.name) > 100:
        fields["name"] = gettext("A policy needs a name of at most 100 printable characters.")
    # A draft, which nobody has made, does not tell what names there are: it may be looked at without making a policy,
    # by those for whom a policy of other hosts does not exist.
    elif policy.created_by and Policy.objects.filter(name=policy.name).exclude(pk=policy.pk).exists():
        fields["name"] = gettext("Another policy already has this name. Choose another name.")


def _names(policy: Policy, kept: Policy | None, fields: Fields) -> None:
    if kept is not None and kept.name_pattern == policy.name_pattern:
        return
    if not policy.name_pattern.replace("\n", " ").replace("\r", " ").replace("\t", " ").isprintable():
        fields["name_pattern"] = gettext("Use printable characters only, and separate patterns by white space.")
    elif len(policy.name_pattern) > 500:
        fields["name_pattern"] = gettext("Use at most 500 characters.")
    elif "!" in policy.name_pattern.split():
        fields["name_pattern"] = gettext(
            "Write an exclusion without a space after the exclamation mark, as in “!*-template*”."
        )


def _numbers(policy: Policy, fields: Fields) -> None:
    for name, (least, most) in BOUNDS.items():
        value = getattr(policy, name)
        if value is None and name in NULLABLE:
            continue
        if not isinstance(value, int) or not least <= value <= most:
            fields[name] = gettext("Enter a whole number from {least:,} to {most:,}.").format(least=least, most=most)

    if policy.backup_max_days is not None and TARGETS.get(policy.kind) == "pool":
        fields["backup_max_days"] = gettext("{kind} works on pools, which have no backups. Leave this empty.").format(
            kind=policy.kind
        )


def _places(policy: Policy, kept: Policy | None, actor: Actor, fields: Fields) -> None:
    rows: dict[str, Callable[[Actor], Any]] = {"hosts": hosts_for, "pools": pools_for}
    for name, seen_by in rows.items():
        given = sorted(set(getattr(policy, name)))
        setattr(policy, name, given)
        known = {*seen_by(actor).filter(pk__in=given).values_list("pk", flat=True), *getattr(kept, name, ())}
        if missing := [str(one) for one in given if one not in known]:
            fields[name] = gettext("This {thing} does not exist: {missing}.").format(
                thing=name.removesuffix("s"), missing=", ".join(missing)
            )
    if not {"hosts", "pools"} & fields.keys() and policy.hosts and policy.pools:
        outside = pools_for(actor).filter(pk__in=policy.pools).exclude(host__in=policy.hosts)
        if (pool := outside.first()) is not None:
            fields["pools"] = gettext("{pool} is on {host}, which is not among the selected hosts.").format(
                pool=pool.name, host=pool.host.name
            )


def _formats(policy: Policy, kept: Policy | None, fields: Fields) -> None:
    policy.formats = sorted(set(policy.formats))
    if unknown := [one for one in policy.formats if one not in {*FORMATS, *getattr(kept, "formats", ())}]:
        fields["formats"] = gettext("{unknown} is not a known format. Choose from {formats}.").format(
            unknown=unknown[0], formats=", ".join(FORMATS)
        )
    elif policy.formats and policy.kind not in IMAGE_KINDS and policy.kind in KINDS:
        fields["formats"] = gettext("{kind} works on {targets}, which have no format. Leave this empty.").format(
            kind=policy.kind, targets=gettext("guests") if TARGETS[policy.kind] == "guest" else gettext("pools")
        )


def _job(policy: Policy, fields: Fields) -> None:
    if policy.kind not in KINDS:
        fields["kind"] = gettext("Choose one of {kinds}.").format(kinds=", ".join(KINDS))
        return
    try:
        policy.options = kinds.get(policy.kind).clean(policy.options)
    except InvalidError as error:
        fields["options"] = error.detail
        return
    for name, (allowed, sentence) in _NEVER.items():
        value = policy.options.get(name, allowed)
        if value != allowed and value not in str(allowed).split():
            fields["options"] = f"{name}: {sentence}"


def _times(policy: Policy, kept: Policy | None, fields: Fields) -> None:
    schedule = Rules.of(policy).schedule
    if kept is not None and Rules.of(kept).schedule == schedule:
        return
    if not {"window_minutes", "quiet_minutes"}.isdisjoint(fields):
        schedule = replace(schedule, window_minutes=LONGEST_WINDOW, quiet_minutes=0)
    # The times in a zone that there is, and the zone with times that there are: both are told at once.
    for one in (replace(schedule, timezone="UTC"), replace(schedule, cron="0 22 * * *", quiet_minutes=0)):
        try:
            one.check(timezone.now())
        except InvalidError as error:
            fields.update(error.fields)
