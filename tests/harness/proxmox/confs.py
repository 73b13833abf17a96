"""Guests' configuration files as Proxmox VE itself treats them: what it cannot read it leaves out, and drops on
writing.

After PVE::QemuServer (``parse_vm_config``, ``write_vm_config``, ``check_type``) and PVE::LXC::Config; independent of
the reader that is tested with it.
"""

import hashlib
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from tests.harness.proxmox import schema

#: Keys of LXC's that PVE::LXC::Config knows; a line with another one is passed over, and dropped on writing.
_LXC = re.compile(r"lxc\.(?:apparmor|cap|cgroup2?|environment|hook|idmap|init|mount|pty|seccomp|signal|tty)(?:\.|$)")
DRIVE = re.compile(r"(ide|sata|scsi|virtio|efidisk|tpmstate)\d+")
Values = dict[str, str]


@dataclass
class Conf:
    """A configuration that was read; what could not be read is gone."""

    digest: str = ""
    now: Values = field(default_factory=dict)
    pending: Values = field(default_factory=dict)
    snapshots: dict[str, Values] = field(default_factory=dict)
    #: What a container passes to LXC as it is, by section: keys and values.
    raw: dict[str, list[list[str]]] = field(default_factory=dict)

    def merged(self) -> Values:
        """With what waits applied."""
        deleted = re.split(r"[,; ]+", self.pending.get("delete", ""))
        waiting = {key: value for key, value in self.pending.items() if key != "delete"}
        return {key: value for key, value in (self.now | waiting).items() if key not in deleted}


def parse_vm(text: str) -> Conf:
    conf = Conf(hashlib.sha1(text.encode()).hexdigest())
    values: Values | None = conf.now
    for line in text.split("\n"):
        if not line.strip():
            continue
        if line.startswith("["):
            values = _vm_section(conf, line)
        elif values is not None and line.startswith("#"):
            values["description"] = values.get("description", "") + unquote(line[1:]) + "\n"
        elif values is not None:
            _vm_line(values, line, values is conf.pending)
    _finish(conf)
    return conf


def _vm_section(conf: Conf, line: str) -> Values | None:
    if re.fullmatch(r"\[PENDING\]\s*", line, re.IGNORECASE):
        return conf.pending
    if re.fullmatch(r"\[special:(cloudinit|fleecing)\]\s*", line, re.IGNORECASE):
        return {}
    snapshot = re.fullmatch(r"\[([a-z][a-z0-9_-]+)\]\s*", line, re.IGNORECASE)
    return conf.snapshots.setdefault(snapshot[1], {}) if snapshot else None


def _vm_line(values: Values, line: str, pending: bool) -> None:
    found = re.fullmatch(r"([a-z][a-z_\-]*\d*):\s*(.+?)\s*", line)
    if found is None:
        return
    key, value = found[1], found[2]
    if key == "delete":
        if pending:
            values[key] = value
        return
    one = schema.find(schema.vm_options(), key)
    if one is not None and not _wrong(one, value):
        values["ide2" if key == "cdrom" else key] = value


def _wrong(one: schema.Spec, value: str) -> str:
    """As ``check_type``: choices are not looked at here, formats are."""
    if one.type == "string" and not one.format:
        return ""
    return schema.wrong_value(one, value)


def parse_container(text: str) -> Conf:
    conf = Conf(hashlib.sha1(text.encode()).hexdigest())
    values, section = conf.now, ""
    for line in text.split("\n"):
        raw = re.fullmatch(r"(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*", line)
        found = re.fullmatch(r"([a-z][a-z_]*\d*):\s*(.+?)\s*", line)
        snapshot = re.fullmatch(r"\[([a-z][a-z0-9_-]+)\]\s*", line, re.IGNORECASE)
        if re.fullmatch(r"\[pve:pending\]\s*", line, re.IGNORECASE):
            values, section = conf.pending, "pve:pending"
        elif snapshot is not None:
            section = snapshot[1]
            values = conf.snapshots.setdefault(section, {})
        elif line.startswith("#"):
            values["description"] = values.get("description", "") + unquote(line[1:]) + "\n"
        elif raw is not None and _LXC.match(raw[1]):
            conf.raw.setdefault(section, []).append([raw[1], raw[2]])
        elif found is not None:
            values[found[1]] = found[2]
    _finish(conf)
    return conf


def _finish(conf: Conf) -> None:
    for values in (conf.now, conf.pending, *conf.snapshots.values()):
        if "description" in values:
            values["description"] = values["description"].rstrip()


def write_vm(conf: Conf) -> str:
    """The file's new text. An ``unusedN`` that a drive names as well is dropped, by the very text of its id."""
    used = {
        volume_of(value) for values in (conf.now, conf.pending) for key, value in values.items() if DRIVE.fullmatch(key)
    }
    for key in [key for key, value in conf.now.items() if key.startswith("unused") and value in used]:
        del conf.now[key]
    parts = [_lines(conf.now)]
    if conf.pending:
        parts.append("[PENDING]\n" + _lines(conf.pending))
    parts += [f"[{name}]\n{_lines(values)}" for name, values in sorted(conf.snapshots.items())]
    return "\n".join(parts)


def write_container(conf: Conf) -> str:
    """The file's new text; what LXC gets as it is stands at the end of each section."""

    def lines(section: str, values: Values) -> str:
        return _lines(values) + "".join(f"{key}: {value}\n" for key, value in conf.raw.get(section, []))

    parts = [lines("", conf.now)]
    if conf.pending:
        parts.append("[pve:pending]\n" + lines("pve:pending", conf.pending))
    parts += [f"[{name}]\n{lines(name, values)}" for name, values in sorted(conf.snapshots.items())]
    return "\n".join(parts)


def _lines(values: Values) -> str:
    described = "".join(
        f"#{line.replace('%', '%25').replace(':', '%3A')}\n"
        for line in values.get("description", "").split("\n")
        if line
    )
    return described + "".join(
        f"{key}: {value}\n" for key, value in sorted(values.items()) if key not in ("description", "digest")
    )


def volume_of(drive: str) -> str:
    """The volume that a drive string names."""
    for part in drive.split(","):
        key, equals, value = part.partition("=")
        if not equals or key in ("file", "volume"):
            return value if equals else part
    return ""


def print_drive(key: str, drive: str) -> str:
    """A drive string as Proxmox VE writes it after a change: the volume first, the rest by name."""
    kind = re.sub(r"\d+$", "", key)
    found = schema.properties(f"vm:{kind}" if kind != "unused" else "vm-now:unused", drive)
    volume = found.pop("file")
    yes, no = ("on", "yes", "true"), ("off", "no", "false")
    known = schema.options(f"vm:{kind}" if kind != "unused" else "vm-now:unused")
    for name, value in found.items():
        if known[name].type == "boolean":
            found[name] = "1" if value in yes else "0" if value in no else value
    return ",".join([volume, *(f"{name}={value}" for name, value in sorted(found.items()))])


def answer(values: Values, digest: str, kind: str, raw: list[list[str]] | None = None) -> dict[str, object]:
    """A configuration as the API gives it: integers and booleans as numbers, the rest as text."""
    known = schema.vm_options() if kind == "vm" else schema.container_options()
    found: dict[str, object] = {}
    for key, value in values.items():
        one = schema.find(known, key)
        is_number = one is not None and one.type in ("integer", "boolean") and re.fullmatch(r"-?\d+", value)
        found[key] = int(value) if is_number else value
    if raw:
        found["lxc"] = raw
    return found | {"digest": digest}
