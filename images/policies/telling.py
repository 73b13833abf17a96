"""A policy that failed or missed its window is an alert, until one of its runs ends well."""

from images.models import PolicyPick, PolicyRun
from storage_admin.events import services as events


def missed(run: PolicyRun) -> None:
    """A window passed unused."""
    _raise(run, "warning", f"Policy {run.policy.name} missed a window", run.detail)


def ended(run: PolicyRun) -> None:
    """A run has ended: opens the policy's alert, or closes it. Call it in the transaction that ends the run."""
    failed = run.picks.filter(state=PolicyPick.State.FAILED).order_by("place", "id")
    first = failed.first()
    if run.state == PolicyRun.State.FAILED and first is None:
        _raise(run, "danger", f"Policy {run.policy.name} could do nothing", run.detail)
    elif first is not None:
        title = f"Policy {run.policy.name}: {failed.count()} of its jobs failed"
        _raise(run, "danger", title, f"{first.label}: {first.reason}")
    elif run.state == PolicyRun.State.FINISHED:
        events.close_alert(_key(run.policy_id))


def removed(policy_id: int) -> None:
    """The policy is deleted, and its alert with it."""
    events.close_alert(_key(policy_id))


def _key(policy_id: int) -> str:
    return f"{events.POLICY_FAILED}:{policy_id}"


def _raise(run: PolicyRun, severity: str, title: str, detail: str) -> None:
    events.raise_alert(
        events.Trouble(
            key=_key(run.policy_id), severity=severity, title=title,
            detail=f"{detail} Look at its run of {run.due:%Y-%m-%d %H:%M} UTC.",
            target_kind="policy", target_id=run.policy_id, target_label=run.policy.name,
        )
    )  # fmt: skip
