"""Setting a priority by vzctl, whose exit code says little: trap by trap."""

import stat
from collections.abc import Sequence

import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.openvz import Effect, NotSetError, set_priority
from storage_admin.hosts.openvz.commands import CommandRun
from storage_admin.hosts.openvz.vzctl import WAITS
from storage_admin.hosts.shells import Done
from tests.harness.openvz import OpenVZHost
from tests.hosts.openvz.conftest import WatchedShell, give
from tests.working import fails_as

SET = ["set", "200", "--ioprio", "7", "--save"]


def test_a_running_container_has_it_now(host: OpenVZHost) -> None:
    path = host.add("200", 'HOSTNAME="a"\nIOPRIO="4"\nONBOOT="yes"\n', "running")
    done = give(host, "200", 7)
    assert (done.by, done.path, done.state, done.effect) == ("vzctl", str(path), "running", Effect.NOW)
    assert (done.before.priority, done.now.priority, done.listed) == (4, 7, 7)
    assert (done.before.lines, done.now.lines) == (('IOPRIO="4"',), ('IOPRIO="7"',))
    assert done.words == "Container 200: 4 before, 7 now; in effect now."
    assert done.notes == ()
    assert host.calls("vzctl") == [SET]
    assert host.in_kernel("200") == 7
    assert path.read_text() == 'HOSTNAME="a"\nIOPRIO="7"\nONBOOT="yes"\n'


@pytest.mark.parametrize("state", ["stopped", "mounted", "suspended"])
def test_one_that_does_not_run_has_it_from_the_next_start(host: OpenVZHost, state: str) -> None:
    host.add("200", state=state)
    done = give(host, "200", "7")
    assert (done.effect, done.before.priority, done.now.priority, done.listed) == (Effect.NEXT_START, None, 7, 7)
    assert done.words == "Container 200: not set before, 7 now; takes effect at next start."
    assert host.in_kernel("200") is None


def test_all_commands_are_told_with_their_exit_codes(host: OpenVZHost) -> None:
    host.add("200")
    told: list[CommandRun] = []
    done = set_priority(host.shell, "200", 7, folders=host.folders, told=told.append)
    assert tuple(told) == done.commands
    by_vzctl = [run for run in told if run.argv[0] == "vzctl"]
    assert [(run.line, run.exit_code) for run in by_vzctl] == [("vzctl set 200 --ioprio 7 --save", 0)]
    assert by_vzctl[0].said == f"CT configuration saved to {host.conf}/200.conf"
    assert {run.argv[0] for run in told} == {"sh", "vzlist", "vzctl"}


def test_a_container_that_does_not_exist_is_refused_and_nothing_is_made(host: OpenVZHost) -> None:
    host.add("201")
    with fails_as(RefusedError, "stale_plan", "no configuration on this host"):
        give(host, "200", 7)
    assert host.calls("vzctl") == []
    assert [path.name for path in host.conf.iterdir()] == ["201.conf"]
    host.shell.run(["vzctl", *SET])
    assert (host.conf / "200.conf").read_text() == 'IOPRIO="7"\n', "the double does not have the trap"


def test_a_link_that_leads_nowhere_is_no_container(host: OpenVZHost) -> None:
    (host.conf / "200.conf").symlink_to("/nonexistent")
    with pytest.raises(RefusedError, match="not a regular file"):
        give(host, "200", 7)
    assert host.calls("vzctl") == []


def test_a_container_that_is_removed_meanwhile_is_no_success(host: OpenVZHost) -> None:
    path = host.add("200")
    host.switch("before_save", "rm -r conf/200.conf private/200")
    with pytest.raises(NotSetError, match="now contains only the priority") as failed:
        give(host, "200", 7)
    assert str(path) in failed.value.detail
    assert "emove that" not in failed.value.detail
    assert failed.value.lost == b'HOSTNAME="ct"\n'
    assert failed.value.outcome.now.priority == 7


def test_an_empty_value_writes_0_which_is_why_it_is_refused_here(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="5"\n')
    with pytest.raises(RefusedError):
        give(host, "200", "")
    assert path.read_text() == 'IOPRIO="5"\n'
    assert host.shell.run(["vzctl", "set", "200", "--ioprio", "", "--save"]).exit_code == 0
    assert path.read_text() == 'IOPRIO="0"\n'


def test_a_locked_container_is_tried_again(host: OpenVZHost) -> None:
    host.add("200")
    host.switch("locked", "2")
    waits: list[float] = []
    done = set_priority(host.shell, "200", 7, folders=host.folders, pause=waits.append)
    assert (done.now.priority, tuple(waits)) == (7, WAITS[:2])
    assert [run.exit_code for run in done.commands if run.argv[0] == "vzctl"] == [9, 9, 0]


def test_one_that_stays_locked_is_refused_in_the_end(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="4"\n')
    host.switch("locked")
    with fails_as(
        RefusedError,
        "guest_locked",
        r"locked by another vzctl for 15 s \(Locked by: pid 4711, cmdline vzctl backup 200.*was not changed",
    ):
        give(host, "200", 7)
    assert len(host.calls("vzctl")) == len(WAITS) + 1
    assert path.read_text() == 'IOPRIO="4"\n'


def test_a_kernel_without_openvz_is_refused(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="4"\n')
    host.switch("no_kernel")
    with fails_as(RefusedError, "tool_missing", "No suitable kernel support compiled in"):
        give(host, "200", 7)
    assert path.read_text() == 'IOPRIO="4"\n'


def test_a_kernel_that_does_not_take_it_leaves_all_as_it_was(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="4"\n', "running")
    host.switch("kernel_refuses")
    with pytest.raises(
        NotSetError, match=r"rejected the priority of container 200.*Unable to set ioprio.*was not changed"
    ) as failed:
        give(host, "200", 7)
    outcome = failed.value.outcome
    assert (outcome.now.priority, outcome.listed, outcome.as_asked) == (4, 4, False)
    assert [run.exit_code for run in outcome.commands if run.argv[0] == "vzctl"] == [148]
    assert path.read_text() == 'IOPRIO="4"\n'


def test_a_kernel_that_does_not_know_it_is_told_although_vzctl_exits_with_0(host: OpenVZHost) -> None:
    host.add("200", 'IOPRIO="4"\n', "running")
    host.switch("kernel_ignores")
    done = give(host, "200", 7)
    assert (done.effect, done.now.priority) == (Effect.UNSUPPORTED, 7)
    assert "saved, but not in effect" in done.words
    assert host.in_kernel("200") is None


def test_exit_0_without_effect_is_no_success(host: OpenVZHost) -> None:
    host.add("200", 'IOPRIO="4"\n')
    host.switch("forgets")
    with pytest.raises(
        NotSetError, match=r"Container 200: 4 before, 4 now; 7 was requested\. vzlist reports 4\."
    ) as failed:
        give(host, "200", 7)
    assert [run.exit_code for run in failed.value.outcome.commands if run.argv[0] == "vzctl"] == [0]


def test_a_failure_that_changed_something_says_what(host: OpenVZHost) -> None:
    host.add("200", 'IOPRIO="4"\n')
    host.switch("crashes")
    with pytest.raises(NotSetError, match=r"exit code 1: .*has 7 now, and had 4 before"):
        give(host, "200", 7)


def test_a_vzctl_that_takes_no_such_value_is_told(host: OpenVZHost) -> None:
    path = host.add("200")
    (host.bin / "vzctl").write_text("#!/bin/sh\necho 'Bad parameter for --ioprio: 7' >&2\nexit 21\n")
    with fails_as(RefusedError, "invalid", "Bad parameter for --ioprio: 7"):
        give(host, "200", 7)
    assert path.read_text() == 'HOSTNAME="ct"\n'


def test_of_several_lines_vzctl_changes_the_first_and_all_agree_in_the_end(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="2"\nHOSTNAME="a"\n IOPRIO=3\nONBOOT="no"\n', "running")
    done = give(host, "200", 7)
    assert (done.before.priority, done.before.lines) == (3, ('IOPRIO="2"', "IOPRIO=3"))
    assert (done.now.priority, done.listed, done.effect) == (7, 7, Effect.NOW)
    assert path.read_text() == 'IOPRIO="7"\nHOSTNAME="a"\n IOPRIO=7\nONBOOT="no"\n'
    assert done.notes == (
        f"{path} sets the priority 2 times, and vzctl changed only the first line. All of these lines now have it.",
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_several_lines_that_cannot_be_made_to_agree_are_told(host: OpenVZHost) -> None:
    path = host.add("200", 'IOPRIO="2"\nIOPRIO="3"\n')
    (host.folder / "ve.conf").hardlink_to(path)
    host.switch("before_save", "ln conf/200.conf second; mv second conf/200.conf.tmp2")
    host.switch("forgets")
    with pytest.raises(NotSetError, match=r"3 before, 3 now; 7 was requested.*has 3 hard links"):
        give(host, "200", 7)


def test_a_configuration_that_is_a_link_stays_one(host: OpenVZHost) -> None:
    """As OpenVZ 7 has it: the file is in the private area."""
    path = host.add("200", 'IOPRIO="2"\n')
    real = host.folder / "private" / "200" / "ve.conf"
    path.rename(real)
    path.symlink_to(real)
    assert give(host, "200", 7).now.priority == 7
    assert path.is_symlink()
    assert real.read_text() == 'IOPRIO="7"\n'


def test_vzctl_makes_a_file_readable_by_all_and_gets_its_mode_taken_back(host: OpenVZHost) -> None:
    path = host.add("200", 'DESCRIPTION="secret"\n')
    path.chmod(0o600)
    done = give(host, "200", 7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert done.notes == (f"vzctl set the owner and mode of {path} to 0:0 644. They were reset to 0:0 600.",)
    assert done.as_asked


def test_a_container_that_starts_meanwhile_has_no_known_effect(host: OpenVZHost) -> None:
    host.add("200")
    host.switch("before_save", "printf running >states/200")
    done = give(host, "200", 7)
    assert (done.state, done.effect, done.now.priority) == ("running", Effect.UNKNOWN, 7)


def test_other_changes_meanwhile_are_kept_and_told(host: OpenVZHost) -> None:
    path = host.add("200")
    host.switch("before_save", "echo 'ONBOOT=\"yes\"' >>conf/200.conf")
    done = give(host, "200", 7)
    assert path.read_text() == 'HOSTNAME="ct"\nONBOOT="yes"\nIOPRIO="7"\n'
    assert done.notes == (f"Another program changed other lines of {path} in the meantime.",)


def test_a_vzlist_that_fails_leaves_the_effect_unknown(host: OpenVZHost) -> None:
    host.add("200", state="running")
    host.switch("vzlist_fails", "out of memory")
    done = give(host, "200", 7)
    assert (done.effect, done.state, done.was_listed, done.as_asked) == (Effect.UNKNOWN, "unknown", False, True)
    assert done.notes == ("vzlist gave no answer. vzlist failed: out of memory",)


def test_a_vzlist_that_contradicts_is_no_success(host: OpenVZHost) -> None:
    host.add("200", 'IOPRIO="7"\n')
    (host.bin / "vzlist").write_text("#!/bin/sh\necho '       200 ct                               stopped     3'\n")
    with pytest.raises(NotSetError, match="vzlist reports 3"):
        give(host, "200", 7)


def test_a_container_by_uuid(host: OpenVZHost) -> None:
    uuid = "c4d2a8f0-1111-4222-8333-123456789abc"
    host.add(uuid, state="running")
    done = give(host, uuid, 0)
    assert (done.now.priority, done.listed, done.effect) == (0, 0, Effect.NOW)


class Silent(WatchedShell):
    """A host that falls silent when vzctl is asked, and stays so."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        if argv[0] == "vzctl" or "vzctl" in {words[0] for words in self.ran}:
            self.ran.append(tuple(argv))
            raise HostError("The host fell silent.")
        return super().run(argv, stdin=stdin, seconds=seconds)


def test_a_host_that_falls_silent_while_vzctl_runs_is_told_as_that(host: OpenVZHost) -> None:
    host.add("200")
    told: list[CommandRun] = []
    with pytest.raises(HostError, match=r"fell silent\. It is unknown whether container 200 was changed"):
        set_priority(Silent(host.shell), "200", 7, folders=host.folders, told=told.append)
    assert [(run.argv[0], run.exit_code) for run in told][-2:] == [("vzctl", None), ("sh", None)]


def test_a_configuration_that_is_gone_afterwards_is_told(host: OpenVZHost) -> None:
    path = host.add("200")
    host.switch("before_save", "rm conf/200.conf")
    host.switch("forgets")
    with pytest.raises(HostError, match=r"vzctl ended with exit code 0, but .* is missing"):
        give(host, "200", 7)
    assert not path.exists()


def test_what_vzctl_prints_is_shown_without_control_characters(host: OpenVZHost) -> None:
    host.add("200")
    (host.bin / "vzctl").write_text("#!/bin/sh\nprintf 'bad \\033[2Jthing\\n' >&2\nexit 3\n")
    with pytest.raises(NotSetError) as failed:
        give(host, "200", 7)
    assert "bad \\x1b[2Jthing" in failed.value.detail
    assert "\x1b" not in failed.value.detail + str(failed.value.outcome)


def test_a_folder_that_is_a_link_into_proxmox_s_is_followed(host: OpenVZHost) -> None:
    """Proxmox VE 2 and 3: OpenVZ's folder is a link into the cluster filesystem."""
    (host.folder / "pve").mkdir()
    host.conf.rmdir()
    host.conf.symlink_to(host.folder / "pve")
    host.add("200")
    assert give(host, "200", 7).now.priority == 7
    assert not (host.folder / "pve" / "200.conf").is_symlink()
