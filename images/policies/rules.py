"""Today's choice: which images a policy would work on, in the order of gain, and why not on the others.

It is made from the database alone, in a number of queries that does not grow with the images, and is quick at 100,000
of them. What a job's plan says of an image, as that its copy does not fit, is asked when its turn comes
(:mod:`images.policies.planned`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import BigIntegerField, Case, Count, F, QuerySet, Value, When
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, NullIf
from django.utils.translation import gettext as _

from images.models import Image, ImageUse
from images.policies import growth, guests, history
from images.policies.backups import Backups
from images.policies.membership import Membership
from images.policies.reasons import NOT_MEANT, Skip
from images.policies.shape import ALONE, Rules
from images.rewrite import refusals, space
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import StoragePool


class Candidate(NamedTuple):
    """An image (or pool, or guest) that no rule leaves out.

    Args:
        gain: bytes that it would win; ``None`` where nothing is won by such a job, or it is not known.
        waits: whether another job has the image now: its turn comes when that has ended.
    """

    id: int
    host_id: int
    pool_id: int | None
    label: str
    gain: int | None
    waits: bool = False


@dataclass
class Choice:
    """What the rules say of everything.

    Args:
        chosen: in the order of gain.
        skips: meant by the policy and left out by a rule, by name.
        not_meant: how many the policy is not for, by code.
    """

    chosen: list[Candidate] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    not_meant: Counter[str] = field(default_factory=Counter)

    @property
    def skipped_by_code(self) -> list[tuple[str, int]]:
        """How many each rule leaves out, the most first."""
        return Counter(skip.code for skip in self.skips).most_common()


class _Row(NamedTuple):
    id: int
    host_id: int
    pool_id: int
    name: str
    declared: str
    format: str
    size: int | None
    gain: int | None
    depth: int
    in_use: bool | None
    in_use_detail: str
    analyzed_at: datetime | None
    state: str
    state_detail: str
    encrypted: bool | None
    preallocation: str
    immutable: bool
    unknown: str | None
    sampled: bool


def choose(rules: Rules, now: datetime, hosts: frozenset[int] | None = None) -> Choice:
    """Applies a policy's rules to all images, pools or guests, as the database knows them.

    Args:
        hosts: of those that the policy is not for, only the ones on these hosts are counted.
    """
    return _choose_images(rules, now, hosts) if rules.on_images else _choose_others(rules, now, hosts)


def _within(hosts: frozenset[int] | None) -> QuerySet[Image]:
    return Image.objects.all() if hosts is None else Image.objects.filter(host__in=hosts)


def others_not_meant(rules: Rules, code: str, hosts: frozenset[int] | None = None) -> list[StoragePool | Guest]:
    """The pools, or guests, that a policy for these is not for, by the code of why, by name; as :func:`not_meant`."""
    return [one for one, said in _others(rules) if said == code and (hosts is None or one.host_id in hosts)]


def _others(rules: Rules, ids: Collection[int] | None = None) -> Iterator[tuple[StoragePool | Guest, str]]:
    """All pools, or guests that a job of the kind is for, each with the code of why the policy is not for it.

    Args:
        ids: only these guests.
    """
    members = Membership(rules)
    if rules.target_kind == "pool":
        for pool in StoragePool.objects.select_related("host").order_by("name", "pk"):
            yield pool, members.stranger(pool.host_id, pool.pk, pool.name)
        return
    pools: dict[int, set[int]] = defaultdict(set)
    uses, rows = ImageUse.objects.all(), Guest.objects.all()
    if ids is not None:
        uses, rows = uses.filter(disk__guest__in=ids), rows.filter(pk__in=ids)
    for guest_id, pool_id in uses.values_list("disk__guest", "image__pool").distinct():
        pools[guest_id].add(pool_id)
    for guest in rows.select_related("host").order_by("name", "pk"):
        if guest.kind == Guest.Kind.CONTAINER and not guest.host.runs_proxmox:
            continue
        if rules.kind == "live_flatten" and guest.kind != Guest.Kind.DOMAIN:
            continue
        yield guest, members.strange_guest(guest.host_id, pools[guest.pk], guest.name)


def not_meant(rules: Rules, code: str, hosts: frozenset[int] | None = None) -> QuerySet[Image] | list[int]:
    """The images that a policy is not for, by the code of why; ids, or rows where the database can tell them apart.

    Args:
        hosts: only those on these hosts.
    """
    if code == "gone":
        return _within(hosts).filter(state__in=Image.NOT_THERE)
    there, members = _within(hosts).exclude(state__in=Image.NOT_THERE), Membership(rules)
    if code not in {"other_name", "other_format"}:
        return there.filter(pool__in=members.pools(code))
    rows = there.filter(pool__in=members.pools("")).order_by("name", "pk")
    columns = rows.values_list("pk", "host_id", "pool_id", "name", "declared_format", "format")
    return [pk for pk, host, pool, name, said, by in columns if members.stranger(host, pool, name, said or by) == code]


def _choose_images(rules: Rules, now: datetime, hosts: frozenset[int] | None) -> Choice:
    choice = Choice()
    rows = list(_meant(rules, Membership(rules), choice.not_meant, hosts))
    judge = _Judge(rules, now, rows)
    kept: list[_Row] = []
    for row in rows:
        skip = judge.skip(row)
        if skip is None:
            kept.append(row)
        else:
            choice.skips.append(skip)
    kept.sort(key=judge.rank)
    gains = rules.kind == "reclaim"
    choice.chosen = [
        Candidate(row.id, row.host_id, row.pool_id, row.name, row.gain if gains else None, row.id in judge.held)
        for row in kept
    ]
    choice.skips.sort(key=lambda skip: (skip.label, skip.id))
    return choice


def _meant(rules: Rules, members: Membership, left: Counter[str], hosts: frozenset[int] | None) -> Iterable[_Row]:
    """The images that the policy is for; how many it is not for is counted, of those elsewhere only on ``hosts``."""
    groups = _within(hosts).order_by().values("pool_id", "state").annotate(count=Count("pk"))
    for pool, state, count in groups.values_list("pool_id", "state", "count"):
        if code := members.elsewhere(pool, state):
            left[code] += count
    there = Image.objects.exclude(state__in=Image.NOT_THERE)
    for row in _rows(rules, there.filter(pool__in=members.pools(""))):
        if code := members.stranger(row.host_id, row.pool_id, row.name, row.format):
            left[code] += 1
        else:
            yield row


def _rows(rules: Rules, images: QuerySet[Image]) -> Iterable[_Row]:
    """What the rules ask of images."""
    method = rules.options.get("method", "auto") if rules.kind == "reclaim" else "auto"
    gain: Any = F("reclaimable_bytes")
    if method != "auto":
        # Of a null in JSON, SQLite makes the text "null".
        gain = Cast(NullIf(KT(f"estimate__methods__{method}__reclaimable_bytes"), Value("null")), BigIntegerField())
    # Every format that is sampled may be copied: where nothing is known of it at all, that says why.
    why = Case(When(gain=None, then=KT(f"estimate__methods__{'copy' if method == 'auto' else method}__reason")))
    flagged = Case(When(refusals.PROTECTED, then=True), default=False)
    sampled = Case(When(analyzed_fingerprint=F("fingerprint"), then=True), default=False)
    images = images.order_by().annotate(gain=gain).annotate(unknown=why, immutable=flagged, sampled=sampled)
    columns = images.values_list(
        "pk", "host_id", "pool_id", "name", "declared_format", "format", "allocated_size", "gain", "chain_depth",
        "in_use", "in_use_detail", "analyzed_at", "state", "state_detail", "encrypted", "preallocation", "immutable",
        "unknown", "sampled",
    )  # fmt: skip
    for pk, host, pool, name, declared, looks, *rest in columns.iterator(chunk_size=5000):
        yield _Row(pk, host, pool, name, declared, declared or looks, *rest)


def left_out_by_now(rules: Rules, ids: Collection[int], now: datetime) -> dict[int, tuple[str, str]]:
    """Of images that were chosen a while ago, those that the rules leave out by now: the code and the reason of each.

    One that a job of the kind has by now is none of them: it waits. Of guests, those that the policy is not for.
    """
    if rules.target_kind == "guest":
        return {one.pk: (code, str(NOT_MEANT[code])) for one, code in _others(rules, ids) if code}
    members, found, meant = Membership(rules), dict[int, tuple[str, str]](), list[_Row]()
    for row in _rows(rules, Image.objects.filter(pk__in=ids).exclude(state__in=Image.NOT_THERE)):
        if code := members.stranger(row.host_id, row.pool_id, row.name, row.format):
            # It was on a host of the policy when it was chosen: another node lists its storage by now.
            code = "lister_not_named" if code == "other_host" else code
            found[row.id] = (code, str(NOT_MEANT[code]))
        else:
            meant.append(row)
    judge = _Judge(rules, now, meant, ids)
    for row in meant:
        skip = judge.skip(row)
        if skip is not None and skip.code != "busy":
            found[row.id] = (skip.code, skip.reason)
    return found


class _Judge:
    """The rules beyond names: each image gets exactly one reason, or none."""

    def __init__(self, rules: Rules, now: datetime, rows: list[_Row], among: Collection[int] | None = None) -> None:
        self._rules, self._now = rules, now
        #: Whether an image has to win something.
        self._gains = bool(rules.kind == "reclaim" or rules.min_reclaimable_bytes or rules.min_reclaimable_percent)
        self._alone = rules.kind in ALONE
        self._writes = self._alone and not (rules.kind == "check" and rules.options.get("repair", "none") == "none")
        self._last = history.last_jobs(rules.kind, "image", among) if rows else {}
        self._at_work = history.at_work(rules.kind, "image")
        self.held = history.held_images() if self._alone else frozenset()
        self._backups = Backups(rules, now, [row.id for row in rows])
        self._regrown: dict[int, growth.Regrown] = {}
        if rules.kind == "reclaim" and not rules.include_decayed:
            sizes = {row.id: row.size for row in rows if row.size is not None}
            self._regrown = growth.regrown(self._last, sizes, now)

    def rank(self, row: _Row) -> tuple[Any, ...]:
        """What comes first: who wins most; where nothing is won, the deepest chain, or who was not done for longest.

        Those whose guests run, and that are waited for, come behind all others.
        """
        size, used = -(row.size or 0), self._alone and row.in_use is True
        if self._rules.kind == "reclaim":
            return (used, -(row.gain or 0), row.name, row.id)
        if self._rules.kind == "flatten":
            return (used, -row.depth, size, row.name, row.id)
        last = self._last.get(row.id)
        done = last.finished if last else row.analyzed_at if self._rules.kind == "analyze" else None
        return (used, done is not None, done.timestamp() if done else 0, size, row.name, row.id)

    def skip(self, row: _Row) -> Skip | None:
        """Why an image is left out; ``None`` where it is not."""
        found = self._state(row) or self._use(row) or self._chain(row) or self._made(row)
        found = found or self._past(row) or self._gain(row) or self._backups.lacking(row.id)
        if found is None:
            return None
        code, *facts = found
        return Skip(row.id, row.host_id, row.pool_id, row.name, code, tuple(facts))

    def _state(self, row: _Row) -> tuple[Any, ...] | None:
        """What no run will change: somebody has to look at it first."""
        if row.state != Image.State.OK:
            return (row.state, row.state_detail)
        if self._alone and not row.declared:
            return ("format_undeclared", row.format)
        if self._gains and row.encrypted:
            return ("encrypted",)
        return ("immutable",) if self._writes and row.immutable else None

    def _use(self, row: _Row) -> tuple[Any, ...] | None:
        if row.id in self._at_work:
            return ("busy", self._rules.kind, self._at_work[row.id])
        if not self._alone or row.in_use is False or row.id in self.held:
            return None  # who uses it while a job has it may be that job: it is asked when its turn comes
        if row.in_use and self._rules.waits_for_guests:
            return None  # what is used by no guest, and so not waited for, its plan says
        return ("guests_unknown" if row.in_use is None else "guest_running", row.in_use_detail)

    def _chain(self, row: _Row) -> tuple[Any, ...] | None:
        if row.depth < self._rules.least_depth:
            return ("chain_too_short", row.depth, self._rules.least_depth)
        if row.depth > refusals.DEEPEST_CHAIN:
            return ("chain_too_deep", row.depth, refusals.DEEPEST_CHAIN)
        return None

    def _made(self, row: _Row) -> tuple[Any, ...] | None:
        """Holes leave the places of a metadata preallocation as they are; all else undoes it.

        Only a sample tells it: where nothing has to be gained, and so to be known, one is wanted for this.
        """
        if self._rules.kind not in space.UNDOES_PREALLOCATION or self._rules.include_preallocated:
            return None
        if row.format not in space.FORMATS["in_place"]:
            return None
        if not (row.preallocation or row.sampled or self._gains):
            return ("not_analyzed", _unknown(row), "It is not known whether the image is preallocated")
        keeps = row.preallocation == "metadata" and self._rules.options.get("method") == "in_place"
        known = row.preallocation in space.PREALLOCATED
        return ("preallocated", row.preallocation) if known and not keeps else None

    def _past(self, row: _Row) -> tuple[Any, ...] | None:
        last = self._last.get(row.id)
        if last is None:
            return None
        back = None if last.undone else self._regrown.get(row.id)
        if back is not None:
            return ("decayed", last.won_bytes, back.grown_bytes, last.job_id, last.finished, back.at)
        return done_lately(self._rules, last, self._now)

    def _gain(self, row: _Row) -> tuple[Any, ...] | None:
        if not self._gains:
            return None
        found = gains_too_little(self._rules, row.gain, row.size)
        return (*found, _unknown(row)) if found == ("not_analyzed",) else found


def _unknown(row: _Row) -> str:
    """Why nobody knows what an image would win."""
    if row.unknown:
        return row.unknown
    if row.format not in space.SAMPLED_FORMATS:
        return _("{format} images cannot be analyzed; {sampled_formats} images can.").format(
            format=row.format, sampled_formats=", ".join(space.SAMPLED_FORMATS)
        )
    return (
        _("it has not been analyzed yet.")
        if row.analyzed_at is None
        else _("it has not been analyzed since it changed.")
    )


def gains_too_little(rules: Rules, gain: int | None, size: int | None) -> tuple[Any, ...] | None:
    """The code and facts of a skip where an image would not win enough.

    Args:
        gain: bytes that it would win; ``None`` where that is not known.
        size: bytes that it takes.
    """
    if gain is None:
        return None if rules.kind == "analyze" else ("not_analyzed",)  # an analysis finds out
    part = 100 * gain / size if size else 0.0
    if gain <= 0 or gain < rules.min_reclaimable_bytes or part < rules.min_reclaimable_percent:
        return ("too_little", gain, part, rules.min_reclaimable_bytes, rules.min_reclaimable_percent)
    return None


def done_lately(rules: Rules, last: history.Last, now: datetime) -> tuple[Any, ...] | None:
    """The code and facts of a skip where the last job of the kind was undone, or is not old enough."""
    if last.undone:
        return ("undone", rules.kind, last.job_id)
    if last.finished + timedelta(hours=rules.min_age_hours) <= now:
        return None
    return ("too_young", rules.kind, last.job_id, last.finished, rules.min_age_hours)


def _choose_others(rules: Rules, now: datetime, hosts: frozenset[int] | None) -> Choice:
    """For kinds that work on pools, or guests: the one that was not done for longest comes first."""
    choice, target = Choice(), rules.target_kind
    last, held = history.last_jobs(rules.kind, target), history.at_work(rules.kind, target)
    depths = guests.depths(rules)
    kept: list[tuple[float, StoragePool | Guest]] = []
    others = list(_others(rules))
    backups = Backups(rules, now, [one.pk for one, code in others if not code])
    for one, code in others:
        if code:
            if hosts is None or one.host_id in hosts:
                choice.not_meant[code] += 1
            continue
        done = last.get(one.pk)
        found = done_lately(rules, done, now) if done else None
        found = guests.reason(rules, one, now, depths) or found if isinstance(one, Guest) else found
        found = found or backups.lacking(one.pk)
        found = ("busy", rules.kind, held[one.pk]) if one.pk in held else found
        if found is None:
            kept.append((done.finished.timestamp() if done else 0.0, one))
        else:
            why, *facts = found
            choice.skips.append(Skip(one.pk, one.host_id, _pool_id(one), one.name, why, tuple(facts)))
    kept.sort(key=lambda pair: pair[0])
    choice.chosen = [Candidate(one.pk, one.host_id, _pool_id(one), one.name, None) for _done, one in kept]
    return choice


def _pool_id(one: StoragePool | Guest) -> int | None:
    return None if isinstance(one, Guest) else one.pk
