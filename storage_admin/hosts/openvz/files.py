"""The files in which OpenVZ keeps its containers' configurations: found, read and replaced by a shell's own means."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.openvz.commands import Commands, is_missing, plain
from storage_admin.hosts.openvz.ids import is_ctid
from storage_admin.hosts.shells import Done

#: Where configurations are: OpenVZ's own folder, and that of Proxmox VE 2 and 3 (a cluster filesystem).
FOLDERS = ("/etc/vz/conf", "/etc/pve/openvz")
#: A configuration has some hundred lines; what is longer than this, in bytes, is none.
LONGEST = 1024 * 1024
#: An old ``sync`` writes out the whole machine.
SYNC_SECONDS = 120.0

_PREAMBLE = "LC_ALL=C; export LC_ALL; PATH=$PATH:/usr/sbin:/sbin\n"

_LOOK = """\
ctid=$1 longest=$2 settings=$3; shift 3
for tool in vzctl vzlist; do if command -v $tool >/dev/null; then echo $tool; fi; done
for folder do
  file=$folder/$ctid.conf
  [ -e "$file" ] || [ -L "$file" ] || continue
  echo "file $file"
  if [ -L "$file" ]; then echo link; fi
  [ -f "$file" ] || { echo odd; exit 0; }
  stat -L -c 'stat %a %h %u:%g' "$file" || exit 1
  df -Pk "$file" 2>/dev/null | while read -r _ _ _ free _; do echo "free $free"; done
  echo "locks $(sed -n 's/^LOCKDIR="\\{0,1\\}\\([^"]*\\).*/\\1/p' "$settings" 2>/dev/null)"
  [ "$(stat -L -c %s "$file")" -le "$longest" ] || { echo long; exit 0; }
  echo content
  exec cat "$file"
done
"""

_READ_ALL = """\
mark=$1 longest=$2; shift 2
for folder do
  for file in "$folder"/*.conf; do
    [ -f "$file" ] && [ "$(stat -L -c %s "$file")" -le "$longest" ] || continue
    printf '%s %s\\n' "$mark" "${file##*/}"
    cat "$file"
    echo
  done
done
"""

# The temporary file begins as a copy of the old one, so that it has its mode, owner and access list; what a filesystem
# does not let anyone set (pmxcfs, where they follow from the path) is the same for both, which the comparison shows.
_WRITE = """\
umask 077; file=$1 temp=$2
fail() { echo "$1" >&2; rm -f "$temp"; exit 1; }
[ -f "$file" ] && [ ! -L "$file" ] || exit 3
set -C
{ true >"$temp"; } || exit 1
set +C
cp -p "$file" "$temp" 2>/dev/null
said=$(dd of="$temp" bs=65536 conv=fsync 2>&1) || fail "$said"
[ "$(stat -c '%a %u %g' "$file")" = "$(stat -c '%a %u %g' "$temp")" ] ||
  fail "The new file could not be given the mode and owner of the old one."
exec cat "$temp"
"""

# The lock is vzctl's own (its lock.c): a file with the number of who holds it, which counts as long as that one lives.
_SWAP = """\
file=$1 temp=$2 lock=$3
[ -f "$file" ] && [ ! -L "$file" ] || exit 3
mine=$lock.sa-$$ clearing=$lock.sa-clearing
held() { holder=; read -r holder 2>/dev/null <"$lock"; [ -d "/proc/${holder:-none}" ]; }
locked() {
  echo "Locked by: pid $holder, cmdline $(tr '\\0' ' ' 2>/dev/null <"/proc/$holder/cmdline")" >&2; exit 4
}
# The holder is gone before it is compared, so that nobody else can take it away in between.
clear() (
  exec 3<"$lock" && { holder=; read -r holder <&3; [ ! -d "/proc/${holder:-none}" ]; } &&
    [ /proc/self/fd/3 -ef "$lock" ] && rm -f "$lock"
)
if [ -d "${lock%/*}" ]; then
  echo $$ >"$mine" || exit 1
  trap '[ ! "$lock" -ef "$mine" ] || rm -f "$lock"; rm -f "$mine"' EXIT
  for try in 1 2 3 4 5 6; do
    if ln "$mine" "$lock" 2>/dev/null; then break; fi
    if held || [ "$try" = 6 ]; then locked; fi
    # Who died has left it, and one at a time clears it.
    if ln "$mine" "$clearing" 2>/dev/null; then
      clear 2>/dev/null
      rm -f "$clearing"
    else
      find "$clearing" -mmin +1 -exec rm -f {} + 2>/dev/null
      sleep 0.1 2>/dev/null || sleep 1
    fi
  done
  [ "$lock" -ef "$mine" ] || { held; locked; }
fi
cmp -s - "$file"
case $? in 0) ;; 1) exit 3 ;; *) echo "cmp could not compare $file." >&2; exit 1 ;; esac
mv -f "$temp" "$file"
"""

#: What the scripts exit with where the file is not what it was any more, and where vzctl works on the container.
_CHANGED, _LOCKED = 3, 4


@dataclass(frozen=True)
class ConfigFile:
    """A container's configuration as it was read.

    Args:
        mode: its permissions, octal.
        names: how many names the file has.
        owner: of the file, as ``user:group`` in numbers.
        free: bytes that its filesystem has room for; ``None`` where it does not say.
        lock: vzctl's lock file of this container; empty where vzctl is not set up.
        is_link: the name leads to a file elsewhere, as OpenVZ 7 has it.
    """

    path: str
    content: bytes
    mode: str
    names: int
    is_link: bool
    owner: str = ""
    free: int | None = None
    lock: str = ""

    def editable(self) -> None:
        """Returns where it is a file that can be replaced by another one without anything being lost.

        Raises:
            RefusedError: ``hard_linked`` where other names lead to it, ``dirty_or_corrupt`` where it is no text.
        """
        if self.is_link:
            sentence = _(
                "{path} is a link. Editing it here would replace the link with a separate file. Edit the file by hand."
            )
            raise RefusedError("hard_linked", sentence.format(path=self.path))
        if self.names > 1:
            raise RefusedError(
                "hard_linked",
                _(
                    "{path} has {names} hard links. Editing it here would separate them. Remove the other links first."
                ).format(path=self.path, names=self.names),
            )
        if b"\0" in self.content:
            raise RefusedError(
                "dirty_or_corrupt",
                _("{path} is damaged: it contains zero bytes. Repair the file first.").format(path=self.path),
            )


@dataclass(frozen=True)
class Looked:
    """What there is for one container: OpenVZ's tools, and its configuration."""

    has_vzctl: bool
    has_vzlist: bool
    file: ConfigFile | None


def look(commands: Commands, ctid: str, folders: Sequence[str]) -> Looked:
    """Reads a container's configuration, from the first folder that has it.

    Args:
        ctid: checked before.

    Raises:
        RefusedError: ``dirty_or_corrupt`` where it is no plain file.
        HostError: it cannot be read.
    """
    settings = folders[0].rpartition("/")[0] + "/vz.conf"
    done = commands.script(_PREAMBLE + _LOOK, ctid, str(LONGEST), settings, *folders)
    head, __, content = done.stdout.partition(b"content\n")
    facts = dict(line.partition(" ")[::2] for line in head.decode("utf-8", "surrogateescape").splitlines())
    path = facts.get("file", "")
    if done.exit_code:
        what = path or _("The configuration of {ctid}").format(ctid=ctid)
        raise HostError(_("{what} could not be read: {words}").format(what=what, words=_words(done)))
    if not path:
        return Looked("vzctl" in facts, "vzlist" in facts, None)
    if "odd" in facts or "long" in facts:
        sentence = _("{path} is not a regular file of at most {longest} bytes. Check what it is.")
        raise RefusedError("dirty_or_corrupt", sentence.format(path=path, longest=LONGEST))
    mode, names, owner = facts["stat"].split()
    free = int(facts["free"]) * 1024 if facts.get("free", "").isdigit() else None
    lock = f"{facts['locks']}/{ctid}.lck" if facts.get("locks", "").startswith("/") else ""
    file = ConfigFile(path, content, mode, int(names), "link" in facts, owner, free, lock)
    return Looked("vzctl" in facts, "vzlist" in facts, file)


def read_all(commands: Commands, folders: Sequence[str]) -> dict[str, bytes]:
    """All containers' configurations by id, each from the first folder that has it.

    Raises:
        HostError: the host cannot be reached, or they could not be read.
    """
    mark = secrets.token_hex(16)  # nothing that stands in a file can be taken for the beginning of the next one
    done = commands.script(_READ_ALL, mark, str(LONGEST), *folders)
    if done.exit_code:
        raise HostError(_("The containers' configurations could not be read: {words}").format(words=_words(done)))
    found: dict[str, bytes] = {}
    for block in done.stdout.split(mark.encode() + b" ")[1:]:
        name, __, content = block.partition(b"\n")
        ctid = name.decode("ascii", "replace").removesuffix(".conf")
        if is_ctid(ctid):
            found.setdefault(ctid, content.removesuffix(b"\n"))
    return found


def replace(commands: Commands, file: ConfigFile, content: bytes) -> None:
    """Puts other content into a configuration, by a file beside it that takes its name.

    Returns once the new content is on the disk, or where only that could not be made sure.

    Raises:
        RefusedError: ``stale_plan`` where the file is not what was read any more, ``guest_locked`` where vzctl works on
            that container; see also ``editable``.
        HostError: it could not be written, and the old file stands; or the host fell silent, which the sentence says.
    """
    file.editable()
    folder, __, name = file.path.rpartition("/")
    # vzlist takes only names that begin with a number for configurations.
    temp = f"{folder}/.{name}.sa-{secrets.token_hex(8)}"
    try:
        written = commands.script(_PREAMBLE + _WRITE, file.path, temp, stdin=content)
        _expect(file, written)
        if written.stdout != content:
            raise HostError(
                _("{temp} does not contain what was written to it. {path} was not changed.").format(
                    temp=temp, path=file.path
                )
            )
        _expect(file, _swap(commands, file, temp))
    except (HostError, RefusedError):
        _remove(commands, temp)
        raise
    try:
        commands.script(_PREAMBLE + 'sync "$1" 2>/dev/null || sync', folder, seconds=SYNC_SECONDS)
    except HostError:
        pass  # told among the commands; the change is there, and the kernel writes it out by itself


def restore_access(commands: Commands, file: ConfigFile, now: ConfigFile) -> str:
    """Gives a configuration the owner, group and permissions back that it had.

    Args:
        file: as it was.
        now: as it is.

    Returns:
        What was done, or could not be, as a sentence; nothing where they are the same.
    """
    had, has = f"{file.owner} {file.mode}", f"{now.owner} {now.mode}"
    if had == has:
        return ""
    if now.owner != file.owner:
        done = commands.run(["chown", file.owner, file.path])
        if done.exit_code:
            return (
                f"The owner and mode of {file.path} changed from {had} to {has} and could not be reset: {_words(done)}"
            )
    done = commands.run(["chmod", file.mode, file.path])  # after the owner, whose change takes bits away
    if done.exit_code:
        return f"The owner and mode of {file.path} changed from {had} to {has} and could not be reset: {_words(done)}"
    return _("vzctl set the owner and mode of {path} to {has}. They were reset to {had}.").format(
        path=file.path, has=has, had=had
    )


def _swap(commands: Commands, file: ConfigFile, temp: str) -> Done:
    try:
        return commands.script(_PREAMBLE + _SWAP, file.path, temp, file.lock, stdin=file.content)
    except HostError as error:
        raise HostError(
            _(
                "{detail} {path} is complete, but it is unknown whether it has the old or the new content. Scan the "
                "host."
            ).format(detail=error.detail, path=file.path)
        ) from error


def _expect(file: ConfigFile, done: Done) -> None:
    if done.exit_code == 0:
        return
    if done.exit_code == _CHANGED:
        sentence = _("{path} was changed by another program in the meantime, and was left unchanged here. Try again.")
        raise RefusedError("stale_plan", sentence.format(path=file.path))
    words = _words(done)
    if done.exit_code == _LOCKED:
        sentence = _("{words}. {path} was not changed. Set the priority again when the lock is released.")
        raise RefusedError("guest_locked", sentence.format(words=words, path=file.path))
    if "Operation not permitted" in words:
        sentence = _("{path} is protected and was not changed (check with lsattr): {words}")
        raise RefusedError("immutable", sentence.format(path=file.path, words=words))
    raise HostError(_("{path} could not be replaced and was not changed: {words}").format(path=file.path, words=words))


def _words(done: Done) -> str:
    return plain(done.stderr) or f"exit code {done.exit_code}" + (", no such command" if is_missing(done) else "")


def _remove(commands: Commands, temp: str) -> None:
    try:
        commands.run(["rm", "-f", temp])
    except HostError:
        pass  # told among the commands; what stays behind is read by nobody
