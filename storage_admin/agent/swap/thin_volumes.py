"""A volume of a thin pool that space is given back of: what LVM and the kernel say of it and of its pool."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from storage_admin.agent.host import lvm, private_device, thin
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.swap import lvm_volumes, volumes
from storage_admin.agent.swap.lvm_volumes import LogicalVolume
from storage_admin.agent.swap.volumes import Place

_COLUMNS = "vg_uuid,lv_uuid,lv_name,lv_size,pool_lv,pool_lv_uuid,thin_id,origin,chunk_size,zero,discards"
#: What the kernel calls pools that do not zero new chunks, that keep what is discarded, or take no writes.
_UNFIT = frozenset({"skip_block_zeroing", "ignore_discard", "read_only"})


@dataclass(frozen=True)
class ThinVolume:
    """A thin volume. Sizes are in bytes.

    Args:
        number: of the volume in its pool.
        chunk: of its pool.
        pool_id: LVM's id of the pool; ``uuid``: of the group and the volume.
    """

    volume: LogicalVolume
    number: int
    size: int
    chunk: int
    pool_id: str
    uuid: str

    @property
    def pool_device(self) -> str:
        """What the device mapper calls the pool itself."""
        return f"{lvm.dm_name(self.volume.group, self.volume.pool)}-tpool"

    def mapped(self, io: AgentIO) -> list[tuple[int, int]]:
        """From and to which of its chunks it has (:func:`thin.mapped`)."""
        return thin.mapped(self.volume.group, self.volume.pool, self.pool_id, self.number, io)

    def device(self, job: str, *, to_write: bool = False) -> AbstractContextManager[int]:
        """A device of a job's own on it (:func:`private_device.opened`)."""
        return private_device.opened(self.pool_device, self.number, self.size, self.uuid, job, to_write=to_write)


def find(place: Place, io: AgentIO) -> ThinVolume:
    """The thin volume that is there, by the ids and the name of the plan.

    Raises:
        RefusedError: ``stale_plan``; ``unsupported_pool``: it is in no thin pool, or reads otherwise than as zeros
            where it has nothing; ``tool_missing``.
        HostError: LVM does not answer.
    """
    one = volumes.find(lvm_volumes, place, place.name, io)
    lines = {line["lv_uuid"]: line for line in lvm.ask("lvs", "lv", _COLUMNS, io, "-a", to_end=True)}
    line, pool = lines.get(one.id), lines.get(lines.get(one.id, {}).get("pool_lv_uuid", ""))
    if line is None or pool is None or not line["thin_id"]:
        raise RefusedError("unsupported_pool", f"{one.path} is in no thin pool, so that it gives nothing back")
    origins = [o for o in lines.values() if (o["vg_uuid"], o["lv_name"]) == (line["vg_uuid"], line["origin"])]
    if line["origin"] and [o["pool_lv_uuid"] for o in origins] != [line["pool_lv_uuid"]]:
        raise RefusedError("unsupported_pool", f"what {one.path} has not, it reads from another volume, not as zeros")
    return ThinVolume(
        one, int(line["thin_id"]), int(line["lv_size"]), int(pool["chunk_size"]), pool["lv_uuid"],
        line["vg_uuid"] + line["lv_uuid"],
    )  # fmt: skip


def refuse_unfit(one: ThinVolume, io: AgentIO) -> None:
    """Let only pools give space back that read as zeros where a volume has nothing, now and once it is written again.

    Raises:
        RefusedError: ``unsupported_pool``; ``busy``: the pool is not active, or takes no writes.
        HostError: LVM or the device mapper do not answer.
    """
    pool = f"{one.volume.group}/{one.volume.pool}"
    asked = lvm.ask("lvs", "lv", "lv_uuid,zero,discards", io, to_end=True)
    told = next((line for line in asked if line["lv_uuid"] == one.pool_id), {"zero": "", "discards": ""})
    done = tools.run_to_end(["dmsetup", "table", one.pool_device], io)
    if done.exit_code:
        raise RefusedError("busy", f"the thin pool {pool} is not active; activate it first")
    features = set(done.stdout.decode("utf-8", "replace").split())
    if told["zero"] != "zero" or "skip_block_zeroing" in features:
        raise RefusedError(
            "unsupported_pool",
            f"the thin pool {pool} does not zero what it gives to a volume: what was given back would not stay zeros",
        )
    if told["discards"] == "ignore" or features & _UNFIT:
        raise RefusedError("unsupported_pool", f"the thin pool {pool} keeps what is discarded (discards=ignore)")
    state = lvm_volumes.thin_pool(one.volume.group, one.volume.pool, io)
    if state is None or state["mode"] not in {"rw", "out_of_data_space"} or state["needs_check"]:
        raise RefusedError("busy", f"the thin pool {pool} takes no changes now; repair it first (lvconvert --repair)")
