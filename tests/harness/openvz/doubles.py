"""vzctl and vzlist as version 4.11 was seen to behave, in a folder instead of a kernel of OpenVZ.

Run as ``doubles.py vzctl|vzlist ARGUMENTS`` with ``OPENVZ_DOUBLE`` naming the folder: ``conf/<ctid>.conf``,
``private/<ctid>``, ``states/<ctid>`` (running, stopped, mounted, suspended). What the kernel is told goes to
``kernel/<ctid>``, each call to ``calls``. It does what nobody would expect of it:

- ``set`` for a container that does not exist makes its configuration, exit 0; so does an empty value, as 0;
- ``set`` replaces the first line of several, readers take the last; a new file has mode 0644;
- ``vzlist`` loops for ever on a configuration of one newline, unless it is asked for other containers by their ids;
- ``vzlist`` cuts names off, hides containers whose private area is missing, and shows 0 for unset in JSON (``-j``).

Files in ``switches/`` turn more on:

- ``locked``: exit 9, so many times (the file's number), or always where it is empty;
- ``no_kernel``: vzctl exits with 5, vzlist prints nothing and exits with 0;
- ``kernel_refuses``: exit 148 for a running container, nothing saved;
- ``kernel_ignores``: a warning, exit 0, saved;
- ``forgets``: exit 0 without effect;
- ``crashes``: exit 1 after the configuration was saved;
- ``full``: exit 0, and a configuration of no bytes, as on a full filesystem;
- ``killed``: ended by signal 9 after the kernel was told; ``killed_after_save``: after that, too;
- ``save_fails``: exit 139 after the kernel was told;
- ``before_save``: a script that runs, in the folder, before vzctl saves;
- ``noise``: lines that vzlist prints before its own; ``vzlist_fails``: exit 1 with these words.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOST = Path(os.environ.get("OPENVZ_DOUBLE", "."))
BLANKS = b" \t\n\r\v\f"
WIDTHS = {"ctid": 10, "hostname": -32, "status": -9, "ioprio": 3, "private": -32}


def main(tool: str, words: list[str]) -> int:
    with (HOST / "calls").open("a") as calls:
        calls.write(json.dumps([tool, *words]) + "\n")
    return {"vzctl": vzctl, "vzlist": vzlist}[tool](words)


def switched(name: str) -> bool:
    return (HOST / "switches" / name).exists()


def say(text: str) -> None:
    print(text, file=sys.stderr)


# vzctl


def vzctl(words: list[str]) -> int:
    if len(words) < 4 or words[0] != "set" or words[2] != "--ioprio":
        say("Usage: vzctl set <ctid> --ioprio <N> [--save]")
        return 20
    ctid, value, save = words[1], words[3], "--save" in words[4:]
    if not ctid.replace("-", "").isalnum() or len(ctid) > 36:
        say(f"Bad CT ID {ctid}")
        return 21
    if value != "" and not (value.lstrip(" ").isdigit() and int(value) <= 7):
        say(f"Bad parameter for --ioprio: {value}")
        return 21
    if switched("no_kernel"):
        print("Directory /proc/vz not found, assuming non-OpenVZ kernel")
        say("No suitable kernel support compiled in")
        return 5
    if locked():
        say("Locked by: pid 4711, cmdline vzctl backup 200")
        say("Container already locked")
        return 9
    return set_priority(ctid, int(value or 0), save=save)


def locked() -> bool:
    path = HOST / "switches" / "locked"
    if not path.exists():
        return False
    left = path.read_text()
    if left:
        path.write_text(str(int(left) - 1))
        if int(left) == 0:
            path.unlink()
            return False
    return True


def set_priority(ctid: str, value: int, *, save: bool) -> int:
    running = state(ctid) == "running"
    if running or not save:
        exit_code = tell_kernel(ctid, value, running=running)
        if exit_code:
            if save:
                say("Error: failed to apply some parameters, not saving configuration file!")
            return exit_code
        if switched("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
    if not save:
        print("WARNING: Settings were not saved to config and will be lost after CT restart (use --save flag)")
        return 0
    if switched("before_save"):
        subprocess.run(["sh", str(HOST / "switches" / "before_save")], cwd=HOST, check=True)
    path = HOST / "conf" / f"{ctid}.conf"
    if not path.exists():
        say(f"WARNING: {path} not found: No such file or directory")
    if switched("save_fails"):
        say(f"Unable to move {path}.tmp -> {path}: No such file or directory")
        return 139
    if switched("full"):
        store(path, b"")
    elif not switched("forgets"):
        store(path, b'IOPRIO="%d"\n' % value)
    if switched("killed_after_save"):
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"CT configuration saved to {path}")
    return 1 if switched("crashes") else 0


def tell_kernel(ctid: str, value: int, *, running: bool) -> int:
    if switched("kernel_ignores"):
        say("Warning: ioprio not supported by the kernel, skipping")
        return 0
    if switched("kernel_refuses") or not running:
        say("Unable to set ioprio: No such process")
        return 148
    (HOST / "kernel" / ctid).write_text(str(value))
    return 0


def store(path: Path, new: bytes) -> None:
    real = Path(os.path.realpath(path))
    lines = real.read_bytes().split(b"\n") if real.exists() else []
    if lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        if line[:7] == b"IOPRIO=":
            lines[number] = new[:-1]
            break
    else:
        lines.append(new[:-1])
    temp = Path(f"{real}.tmp")
    os.umask(0o022)
    temp.write_bytes(b"".join(line + b"\n" for line in lines) if new else b"")
    temp.rename(real)


# vzlist


def vzlist(words: list[str]) -> int:
    everything, as_json, columns = "-a" in words, "-j" in words, ["ctid", "hostname"]
    for number, word in enumerate(words):
        if word.startswith("-") and not word.startswith("--") and word.endswith("o"):
            columns = words[number + 1].split(",")
        everything |= word in ("-aH", "-aHo")
    unknown = [column for column in columns if column not in WIDTHS]
    if unknown:
        say(f"Unknown field: {unknown[0]}")
        return 1
    if switched("vzlist_fails"):
        say((HOST / "switches" / "vzlist_fails").read_text())
        return 1
    if switched("no_kernel"):
        say("Unable to open /proc/vz/veinfo: No such file or directory")
        return 0
    asked = [word for word in words if word[:1].isalnum() and "," not in word and word not in WIDTHS]
    return list_all(columns, asked, everything=everything, as_json=as_json)


def list_all(columns: list[str], asked: list[str], *, everything: bool, as_json: bool) -> int:
    paths = sorted((HOST / "conf").glob("*.conf"), key=lambda path: path.stem.zfill(40))
    paths = [path for path in paths if not asked or path.stem in asked]
    if not paths:
        say("Container(s) not found")
        return 1 if asked else 0
    if any(path.read_bytes() == b"\n" for path in paths):
        while True:
            time.sleep(60)
    if switched("noise"):
        sys.stdout.buffer.write((HOST / "switches" / "noise").read_bytes())
    rows = []
    for path in paths:
        ctid, running = path.stem, state(path.stem) == "running"
        if running or (everything and (HOST / "private" / ctid).is_dir()):
            rows.append(facts(ctid, path.read_bytes()))
    if as_json:
        shown = [{"ctid": int(row["ctid"] or 0), "ioprio": int(row["ioprio"] or 0)} for row in rows]
        print(json.dumps(shown))
        return 0
    for row in rows:
        cells = [cell(row[column] or b"-", column, last=column == columns[-1]) for column in columns]
        sys.stdout.buffer.write(b" ".join(cells).rstrip(BLANKS) + b"\n")
    return 0


def cell(raw: bytes, column: str, *, last: bool) -> bytes:
    width = WIDTHS[column]
    if width > 0:
        return raw.rjust(width)
    padded = raw.ljust(-width)
    return padded if last or column == "status" else padded[:-width]


def state(ctid: str) -> str:
    path = HOST / "states" / ctid
    return path.read_text() if path.exists() else "stopped"


def facts(ctid: str, content: bytes) -> dict[str, bytes | None]:
    """A container's row, from its configuration; ``None`` where a value is not set."""
    row: dict[str, bytes | None] = {
        "ctid": ctid.encode(), "hostname": None, "status": state(ctid).encode(), "ioprio": None,
        "private": str(HOST / "private" / ctid).encode(),
    }  # fmt: skip
    # Its buffer has as many bytes as the file, and one of them is the string's end.
    lines = content.split(b"\n") if b"\n" in content else [content[:-1], content[-1:]]
    for number, line in enumerate(lines, 1):
        key, value = parsed(line)
        if key == b"HOSTNAME":
            row["hostname"] = value or b" "
        elif key == b"VE_PRIVATE":
            row["private"] = value.replace(b"$VEID", ctid.encode())
        elif key == b"IOPRIO":
            number_read = c_number(value)
            if number_read is not None:
                row["ioprio"] = b"%d" % number_read if 0 <= number_read <= 7 else None
            if number_read is None or not 0 <= number_read <= 7:
                say(f'Warning at {ctid}.conf:{number}: invalid value for IOPRIO ("{value!r}"), skipped')
    return row


def parsed(line: bytes) -> tuple[bytes, bytes]:
    """Key and value of a line as parse_line finds them, byte by byte; an empty key where there is none."""
    text, escaped = bytearray(), False
    for byte in line:
        if byte == 0:
            break
        if byte == ord("\\") and not escaped:
            escaped = True
            continue
        text.append(byte)
        escaped = False
    kept = bytes(text).strip(BLANKS)
    equals = kept.find(b"=")
    if not kept or kept[0] == ord("#") or equals < 0:
        return b"", b""
    key, value = kept[:equals], kept[equals + 1 :]
    if value[:1] != b'"':
        return key, value
    end = value.rfind(b'"')
    return (key, value[1:end]) if end > 0 else (b"", b"")


def c_number(value: bytes) -> int | None:
    """What strtol makes of a whole string, within an int."""
    if value == b"":
        return 0
    digits = value.lstrip(BLANKS)
    sign, digits = (digits[:1], digits[1:]) if digits[:1] in (b"+", b"-") else (b"", digits)
    if not digits or any(byte not in b"0123456789" for byte in digits):
        return None
    number = 0
    for byte in digits:
        number = min(number * 10 + byte - ord("0"), 2**40)
    number = -number if sign == b"-" else number
    return number if -(2**31) <= number < 2**31 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
