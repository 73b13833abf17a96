"""A policy that failed or missed its window is an alert, until one of its runs ends well or it is switched off."""

from images.models import Policy, PolicyPick, PolicyRun
from storage_admin.events import services as events


def missed(run: PolicyRun) -> None:
    """A window passed unused."""
    _raise(run, "warning", f"Policy {run.policy.name} missed a window", run.detail)


def ended(run: PolicyRun) -> None:
    """A run has ended: opens the policy's alert, or closes it. Call it in the transaction that ends the run."""
    failed = run.picks.filter(state=PolicyPick.State.FAILED).order_by("place", "id")
    first = failed.first()
    if run.state == PolicyRun.State.FAILED and first is None:
        _raise(run, "danger", f"Policy {run.policy.name} could not run any job", run.detail)
    elif first is not None:
        title = f"Policy {run.policy.name}: {failed.count()} of its jobs failed"
        _raise(run, "danger", title, f"{first.label}: {first.reason}")
    elif run.state == PolicyRun.State.FINISHED:
        events.close_alert(_key(run.policy_id))


def cannot_be_told(policy: Policy, why: str) -> None:
    """Nobody can tell when a policy's windows open."""
    detail = f"{why} No run starts until the times of the policy are changed, or it is disabled."
    _open(policy, "danger", f"Policy {policy.name}: cannot tell when its windows open", detail)


def ended_for_good(policy_id: int) -> None:
    """The policy is deleted or switched off, and its alert goes with it."""
    events.close_alert(_key(policy_id))


def _key(policy_id: int) -> str:
    return f"{events.POLICY_FAILED}:{policy_id}"


def _raise(run: PolicyRun, severity: str, title: str, detail: str) -> None:
    _open(run.policy, severity, title, f"{detail} See the run of {run.due:%Y-%m-%d %H:%M} UTC.")


def _open(policy: Policy, severity: str, title: str, detail: str) -> None:
    events.raise_alert(
        events.Trouble(
            key=_key(policy.pk), severity=severity, title=title, detail=detail, target_kind="policy",
            target_id=policy.pk, target_label=policy.name,
        )
    )  # fmt: skip
