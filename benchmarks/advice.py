"""What to choose, in a sentence with its numbers: only where the repetitions allow it.

Two settings differ where not one repetition of the one reached into what the other's repetitions span
(:func:`benchmarks.figures.differ`). What cannot be told apart is called that, and never as good.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from benchmarks import depths, results
from benchmarks.figures import NO_DIFFERENCE, Advice, differ, figure, listed, times, too_few, value_of, why_not
from benchmarks.results import Result
from storage_admin.words import plural

#: Bytes by which a new image has to be larger: tables of some clusters are nothing that anybody would pay for.
WORTH_SAYING = 1 << 20


@dataclass(frozen=True)
class Matrix:
    """What is to be chosen from one kind of run.

    Args:
        topic: what is chosen, as a heading.
        metric: what decides.
        usual: the setting that one would have without choosing, by its name; others are measured against it.
        layouts: those of the settings that belong to it; all settings unless told.
        doing: the verb of the sentence, as in "64K *writes* 1.4 times faster".
        costs: metrics that the winner may pay with.
    """

    topic: str
    metric: str
    usual: str
    doing: str
    costs: tuple[str, ...] = ()
    layouts: frozenset[str] = frozenset()


_LAYOUTS = frozenset({"raw", "qcow2", "raw+qcow2", "qcow2+qcow2"})
_COMPRESSED = frozenset({"qcow2", "zlib", "zstd"})
_CHAINS = frozenset({"qcow2", "qcow2+qcow2", "chain"})
_CREATED = ("create_seconds", "physical_bytes")
#: The modes of a disk of which the definition says nothing.
_UNSET = "writeback threads"
MATRICES: dict[str, tuple[Matrix, ...]] = {
    "cluster_size": (Matrix(_("Cluster size"), "write_rate", "64K", _("writes"), _CREATED),),
    "preallocation": (Matrix(_("Preallocation"), "write_rate", "off", _("writes"), _CREATED),),
    "formats": (
        Matrix(_("Layout, random reads"), "rand_read_iops", "qcow2", _("does random reads"), layouts=_LAYOUTS),
        Matrix(_("Layout, random writes"), "rand_write_iops", "qcow2", _("does random writes"), layouts=_LAYOUTS),
        Matrix(_("Chain depth"), "rand_read_iops", "qcow2", _("does random reads"), layouts=_CHAINS),
        Matrix(_("Compression at read time"), "seq_read_rate", "qcow2", _("reads"), layouts=_COMPRESSED),
    ),
    "modes": (
        Matrix(_("Cache and AIO, random reads"), "rand_read_iops", _UNSET, _("does random reads")),
        Matrix(_("Cache and AIO, random writes"), "rand_write_iops", _UNSET, _("does random writes")),
    ),
    "boot": (Matrix(_("Layout"), "boot_all_seconds", "qcow2+qcow2", _("boots")),),
    "dd": (
        Matrix(_("Writing"), "write_rate", "direct I/O 1M", _("writes")),
        Matrix(_("Reading"), "read_rate", "direct I/O 1M", _("reads")),
    ),
}
#: Ways of dd: a guest's cache=none is the one, cache=writeback the other.
_WAYS = {"direct": "direct I/O", "fdatasync": "cached I/O"}


def of(kind: str, rows: Sequence[Result], where: str) -> list[Advice]:
    """A sentence for each matrix of a kind that the results have figures for.

    Args:
        where: the pool, as in "on *fast*".
    """
    given = depths.of(rows, where) if kind == "fio" else []
    for matrix in MATRICES.get(kind, ()):
        of = [row for row in rows if not matrix.layouts or row.setting.get("layout") in matrix.layouts]
        for block in dict.fromkeys(map(_block, rows)):
            mine = [row for row in of if row.metric == matrix.metric and _block(row) == block]
            if len(told := [row for row in mine if row.median is not None]) > 1:
                given.append(_advise(matrix, told, [row for row in rows if _block(row) == block], where, block))
    return given


def _block(row: Result) -> str:
    """Where a kind repeats its matrix for several blocks, each is one of its own."""
    if "guests" in row.setting:
        return plural(int(row.setting["guests"]), gettext("guest,guests"))
    return str(row.setting.get("block", "")) if "layout" in row.setting else ""


def _advise(matrix: Matrix, rows: list[Result], beside: list[Result], where: str, block: str) -> Advice:
    way = results.better(matrix.metric)
    ranked = sorted(rows, key=lambda row: way * value_of(row), reverse=True)
    best, slowest = ranked[0], ranked[-1]
    topic = gettext(matrix.topic) + (f", {block}" if block else "")
    usual = next((row for row in rows if _named(row) == matrix.usual), None)
    first = slowest
    if usual and differ(best, usual):
        first = usual
    elif usual and differ(usual, slowest):
        best = usual  # not to be told from the best one, and what one would have anyway
    if not differ(best, first):
        return Advice(topic, _same(where, best, first), measurable=False)
    told = gettext("On {where}, {best} {doing} {times} faster than {first} ({figure} vs. {other})").format(
        where=where, best=_named(best), doing=gettext(matrix.doing), times=times(best, first), first=_named(first),
        figure=figure(best), other=figure(first),
    )  # fmt: skip
    if equals := [_named(row) for row in ranked if row is not best and not differ(best, row)]:
        told += gettext("; compared with {equals}, there is {nothing}").format(
            equals=listed(equals), nothing=NO_DIFFERENCE
        )
    if first is usual and differ(slowest, usual):
        told += gettext("; {slowest} is the slowest ({figure})").format(slowest=_named(slowest), figure=figure(slowest))
    return Advice(topic, f"{told}{_paid(matrix, best, first, beside)}.", measurable=True, best=best.setting)


def _same(where: str, best: Result, slowest: Result) -> str:
    """Others between these two are not compared: of many, two differ by chance."""
    if few := too_few([best, slowest], where):
        return few
    return gettext(
        "On {where}, there is {nothing} between the fastest, {best} (median {figure}), and the slowest, {slowest} "
        "({other}){why}."
    ).format(
        where=where, nothing=NO_DIFFERENCE, best=_named(best), figure=figure(best), slowest=_named(slowest),
        other=figure(slowest), why=why_not([best, slowest]),
    )  # fmt: skip


def _paid(matrix: Matrix, best: Result, first: Result, beside: list[Result]) -> str:
    """What the winner costs against the one that it was measured against, as far as that can be told."""
    told, known = [], 0
    for metric in matrix.costs:
        found = {row.key: row for row in beside if row.metric == metric and row.median is not None}
        mine, other = found.get(best.key), found.get(first.key)
        if mine is None or other is None:
            continue
        known += 1
        if metric == "physical_bytes" and value_of(mine) - value_of(other) >= WORTH_SAYING:
            told.append(
                gettext("takes {mine} instead of {other} when new").format(mine=figure(mine), other=figure(other))
            )
        elif metric == "create_seconds" and value_of(mine) > value_of(other) and differ(mine, other):
            told.append(
                gettext("takes {mine} instead of {other} to create").format(mine=figure(mine), other=figure(other))
            )
    if told:
        return gettext("; it {costs}").format(costs=gettext(" and ").join(told))
    return gettext("; creating it takes no more time or space") if known and known == len(matrix.costs) else ""


def _named(row: Result) -> str:
    own = "layout" in row.setting
    setting = {name: value for name, value in row.setting.items() if not (own and name in {"block", "guests"})}
    if "sync" in setting:
        setting = {"sync": _WAYS.get(setting["sync"], setting["sync"]), "block": setting.get("block", "")}
    return results.name_of(setting).strip()
