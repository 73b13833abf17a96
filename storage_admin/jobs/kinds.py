"""What a kind of job is, and the table of them all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

from django.conf import settings
from django.utils.module_loading import import_string
from django.utils.translation import gettext, gettext_noop

from storage_admin.accounts.models import Actor, Role
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import LastBackup, Plan, Recorder, cleaned
from storage_admin.words import Translatable, words


@dataclass(frozen=True)
class Lock:
    """A resource that a job needs: alone, or together with others that only read it."""

    key: str
    exclusive: bool


@dataclass(frozen=True)
class Target:
    """What a job works on, resolved from its kind and id."""

    kind: str
    id: int
    host: Host
    label: str


@dataclass(frozen=True)
class Wait:
    """Something outside of the dashboard that a queued job waits for.

    Args:
        reason: what it is, as in "waits for …".
        until: when the job is given up.
        guests: the guests whose end it waits for: each ``kind``, ``uid``, ``name``.
        parked_for: whom.
    """

    reason: str
    until: datetime
    guests: tuple[dict[str, str], ...] = ()
    parked_for: str = Job.ParkedFor.GUESTS


@dataclass(frozen=True)
class Unsuccessful:
    """What is true of a job that did not succeed, whichever moment that was, in a sentence.

    Args:
        cut_off: of one of which nobody knows how far it came.
        ended: of one whose end is known: it was refused, cancelled or has failed, and all was put back.
        open_from: the agent's stage from which on a failure of the host leaves open what came of it; empty for any.
    """

    cut_off: str
    ended: str = ""
    open_from: str = "swapping"


#: What a row keeps of a job whose work is begun outside of the dashboard, and goes on there without a worker.
BEGUN = "begun"
#: In that: pairs of paths, of an image and of another in which a guest may have gone on, as long as nobody knows.
OVER = "over"


class GoesOnError(Exception):
    """Whoever follows a job has to leave it, as the argument says: the next worker takes over what goes on outside."""


class JobKind(ABC):
    """One kind of job.

    A kind says who may submit it, which options it takes, what it would do (:meth:`plan`), what it needs alone
    (:meth:`locks`), what the agent is asked (:meth:`request`) and what the answer changes (:meth:`record`).
    """

    name: ClassVar[str]
    title: ClassVar[Translatable]
    description: ClassVar[Translatable]
    target: ClassVar[str]
    role: ClassVar[Role] = Role.OPERATOR
    #: The agent's verb; most kinds are named like it. Empty for a kind that needs no agent.
    verb: ClassVar[str] = ""
    #: It replaces or changes an image: counted against the host's limit, and never started twice.
    rewrites: ClassVar[bool] = False
    #: It changes nothing on its host that outlives it, whatever its options (:meth:`only_looks`).
    looks: ClassVar[bool] = False
    #: Where it is cut off, a recovery clears what it has left on its host.
    leaves: ClassVar[bool] = False
    #: At most one of its kind at work per host; a queued one is returned instead of queueing another.
    single: ClassVar[bool] = False
    #: Whether its agent asks for leave (``ready``) before it changes what was there: until then nothing has happened.
    asks: ClassVar[bool] = True
    #: It measures the host: at most one of them at work there, and none together with a rewriting job, whichever of the
    #: two comes first (:meth:`may_disturb`).
    measures: ClassVar[bool] = False
    #: An emergency of somebody's: it waits for nobody who measures. The figures taken meanwhile say so.
    urgent: ClassVar[bool] = False
    #: The most of a worker's threads for jobs of this kind: what starts by itself must not keep other jobs waiting.
    share: ClassVar[float] = 1.0
    #: Its work goes on outside of the dashboard when its worker ends, once the row keeps :data:`BEGUN`: the next worker
    #: finds it there and takes it over, and a cancel waits for that one.
    goes_on: ClassVar[bool] = False
    #: From where to where each of the agent's stages brings the whole job, in percent; unknown stages do not move it.
    stages: ClassVar[dict[str, tuple[float, float]]] = {}
    #: Whether its progress is counted in bytes, or in something else, as steps.
    progress_in_bytes: ClassVar[bool] = True
    #: What is said of a job that did not succeed, by the method of its plan; that of "" goes for all others.
    unsuccessful: ClassVar[dict[str, Unsuccessful]] = {
        "": Unsuccessful(gettext_noop("It is not known how far the job came."))
    }
    #: The code of one that was given up because what it waited for was never brought.
    given_up: ClassVar[str] = "stale_plan"
    #: It cannot be undone: its page has a name typed (:meth:`to_type`).
    no_way_back: ClassVar[bool] = False
    #: JSON Schema of each option, with its default.
    properties: ClassVar[dict[str, dict[str, Any]]] = {}
    #: Words of the methods whose own name says too little.
    methods: ClassVar[dict[str, Translatable]] = {}
    #: Switches of a policy that only some kinds heed: their columns, and their words.
    policy_switches: ClassVar[dict[str, Translatable]] = {}

    @property
    def options_schema(self) -> dict[str, Any]:
        """JSON Schema of the options: those without a default have to be given."""
        schema = {"type": "object", "properties": deepcopy(self.properties), "additionalProperties": False}
        required = [name for name, option in self.properties.items() if "default" not in option]
        return schema | ({"required": required} if required else {})

    def titled(self, options: dict[str, Any]) -> str:  # noqa: ARG002 (for those where it depends)
        """Its title in a list of policies, with what these options make of it."""
        return str(self.title)

    def method_word(self, method: str) -> str:
        """A method's word, as on the button that starts it."""
        return str(self.methods.get(method) or words(method).capitalize())

    def to_type(self, label: str, options: dict[str, Any]) -> str:  # noqa: ARG002 (for those where it depends)
        """What is typed to confirm it: the label of what it works on where there is no way back, else nothing."""
        return label if self.no_way_back else ""

    def at_most(self, job: Job) -> int | None:
        """How many bytes a second it may move: as its options say, else as its host does; ``None`` for no limit."""
        if "bandwidth_bytes_sec" not in self.properties:
            return None
        given: int | None = job.options.get("bandwidth_bytes_sec")
        return job.host.bandwidth_bytes_sec if given is None else given

    def clean(self, options: Any) -> dict[str, Any]:
        """The options with the defaults of those that were not given; raises InvalidError, which names each bad one."""
        return cleaned(self.name, self.options_schema, options, self.wrong)

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:  # noqa: ARG002 (for those that have more to say)
        """What is wrong with options that the schema allows, in sentences by their names; empty ones for nothing."""
        return {}

    @abstractmethod
    def resolve(self, target_id: int) -> Target:
        """The target of that id.

        Raises:
            NotFoundError: there is none.
        """

    def look(self, target_id: int, job: Job | None = None) -> None:  # noqa: B027 (most kinds need nothing)
        """Has what the plan rests on, and may have passed, looked at again on its host.

        Args:
            job: the one that is about to begin with it, for which nobody waits; else it takes a second at most.
        """

    @abstractmethod
    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        """What the job would do, from the database alone; of a VM of Proxmox VE, from what its node tells as well."""

    def last_backups(self, target: Target, plan: Plan) -> tuple[LastBackup, ...]:  # noqa: ARG002 (for those that need it)
        """The last backups of the guests whose data the job deletes or rewrites, those that help least first."""
        return ()

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (for those that need it)
        """What the job needs for itself or shared, from its submission to its end."""
        return []

    def admit(self, target: Target, plan: Plan) -> None:  # noqa: B027 (most kinds need nothing)
        """Looks once more at what other jobs may have taken since the plan, in the transaction that queues the job.

        Raises:
            RefusedError: it is not free any more.
        """

    def submitted(self, job: Job) -> None:  # noqa: B027 (most kinds need nothing)
        """Writes what belongs to a job beside its row, in the transaction that queues it."""

    def may_disturb(self, options: dict[str, Any]) -> bool:  # noqa: ARG002 (for those that measure)
        """Whether a job that measures and rewriting ones may be at work at the same time, by its options."""
        return False

    def passes(self, job: Job, code: str) -> bool:  # noqa: ARG002 (for those that go on)
        """Whether a failure with that code says nothing of work that goes on, so that the next worker tries again."""
        return False

    def secrets(self, options: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002 (for those that need some)
        """The names of the passphrases that a job with these options needs (:mod:`storage_admin.jobs.sealed`)."""
        return ()

    def only_looks(self, options: dict[str, Any]) -> bool:  # noqa: ARG002 (for those where it depends)
        """Whether it changes nothing on its host that outlives it: its end is then no entry of the audit trail."""
        return self.looks

    def waits_for_storage(self, job: Job) -> str:  # noqa: ARG002 (for those that rewrite)
        """The storage that a queued job would only hang on, as in "waits for …"; empty where all answer."""
        return ""

    def verb_for(self, job: Job) -> str:  # noqa: ARG002 (for those that have several)
        """What the agent is asked to do."""
        return self.verb

    def must_wait(self, job: Job, *, ask: bool) -> Wait | None:  # noqa: ARG002 (most kinds wait for nothing outside)
        """What outside of the dashboard a queued job has to wait for; called whenever it might be claimed.

        Args:
            ask: also ask outside, which may take seconds; else the database alone answers.
        """
        return None

    def prepare(self, job: Job) -> None:  # noqa: B027 (most kinds need nothing)
        """Looks at what the controller itself can see, right before the agent is asked.

        Raises:
            RefusedError: the world has moved since the plan.
        """

    def before_swap(self, job: Job) -> None:  # noqa: B027 (most kinds need nothing)
        """Changes what has to be changed outside of the image before the agent may swap; what it was is kept first.

        Whether the swap comes about is not known then: :meth:`ended`, or a recovery, puts it right. Where the database
        goes away in the middle of it, it is called again with the same row, and goes on where it was.

        Raises:
            RefusedError, HostError: the agent is not let go, and puts its work back.
        """

    def exchanged(self, job: Job) -> None:  # noqa: B027 (most kinds need nothing)
        """Looks again right after the files were exchanged, where an agent asks for that, before either is removed.

        Raises:
            RefusedError, HostError: somebody may use either file: the agent keeps both. ``image_in_use``: the one that
                went alone is used, and gets its name back.
        """

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:  # noqa: B027 (most kinds need nothing)
        """Keeps what the agent says of files right before it exchanges them: by it a recovery tells whether it did."""

    def in_controller(self, job: Job) -> bool:  # noqa: ARG002 (for those where it depends)
        """Whether the job is done here, by :meth:`work`, and not by an agent on its host."""
        return not self.verb

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        """Does a job that needs no agent; called after :meth:`prepare`.

        Args:
            recorder: takes progress, log lines and commands; ``tick`` it at least every second, and look then whether
                ``cancel_requested``.

        Returns:
            What :meth:`record` gets.

        Raises:
            RefusedError, HostError, StoppedError: as an agent says them.
        """
        raise NotImplementedError(f"{self.name} is done by an agent")

    def request(self, job: Job) -> dict[str, Any]:
        """The arguments of the agent's verb.

        Raises:
            RefusedError: the target is not what it was when the job was planned.
        """
        raise NotImplementedError(f"{self.name} ({job.uid}) is done without an agent")

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        """An event of the agent that only this kind knows.

        Raises:
            ValueError: this kind does not know it either.
        """
        raise ValueError(f"{self.name} ({job.uid}) does not know the event {event['event']!r}")

    @abstractmethod
    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        """Writes what the agent's result changes; it runs in the transaction that ends the job.

        Returns:
            The job's result as the API shows it.
        """

    def ended(self, job: Job) -> None:  # noqa: B027 (most kinds need nothing)
        """Called after the job's end was written, whichever it was."""


class HostKind(JobKind):
    """A kind whose target is a host."""

    target = "host"

    def resolve(self, target_id: int) -> Target:
        host = Host.objects.filter(pk=target_id).first()
        if host is None:
            raise NotFoundError(gettext("Host {target} does not exist.").format(target=target_id))
        return Target(kind="host", id=host.pk, host=host, label=host.name)

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        return Plan(reason=str(self.description), facts_at=self.resolve(target_id).host.last_seen)


def leaves_traces(job: Job) -> bool:
    """Whether a job that was cut off may have left something on its host, which a recovery then looks for."""
    kind = get(job.kind)
    return job.rewrites or kind.measures or kind.leaves


def goes_on(job: Job) -> bool:
    """Whether a job's work goes on outside of the dashboard without a worker."""
    kind = find(job.kind)
    return kind is not None and kind.goes_on and BEGUN in job.kept


def in_doubt(job: Job) -> list[list[str]]:
    """The pairs of :data:`OVER` that a job keeps."""
    return pairs_of(job.kept.get(BEGUN, {}))


def pairs_of(begun: Mapping[str, Any]) -> list[list[str]]:
    """The same of what is kept in :data:`BEGUN`; an earlier version kept the one pair alone."""
    over = begun.get(OVER) or []
    return [over] if over and isinstance(over[0], str) else list(over)


def unsuccessful(job: Job) -> Unsuccessful:
    """What is true of a job that did not succeed; of a kind that there is no more nothing is known."""
    said: dict[str, Unsuccessful] = getattr(find(job.kind), "unsuccessful", JobKind.unsuccessful)
    return said.get((job.plan or {}).get("method", ""), said[""])


def only_looked(job: Job) -> bool:
    """Whether a job's kind only looks, by its options; of a kind that there is no more nobody knows that."""
    kind = find(job.kind)
    return kind is not None and kind.only_looks(job.options)


@lru_cache(maxsize=1)
def _table() -> dict[str, JobKind]:
    kinds: list[JobKind] = [import_string(path)() for path in settings.JOB_KINDS]
    return {kind.name: kind for kind in kinds}


def every() -> list[JobKind]:
    """All kinds, in the order of the settings."""
    return list(_table().values())


def titles() -> dict[str, str]:
    """The titles of all kinds by their names."""
    return {kind.name: str(kind.title) for kind in every()}


def find(name: str) -> JobKind | None:
    """The kind of that name; ``None`` where there is none any more."""
    return _table().get(name)


def get(name: str) -> JobKind:
    """The kind of that name.

    Raises:
        InvalidError: there is none.
    """
    try:
        return _table()[name]
    except (KeyError, TypeError):
        known = ", ".join(_table())
        raise InvalidError(
            gettext("{name!r} is not a job kind. Choose one of {known}.").format(name=name, known=known),
            {"kind": gettext("One of {known}.").format(known=known)},
        ) from None
