"""Proxmox VE's own schema of the calls that our client makes: what is asked and what is answered is held to it.

``tests/data/proxmox/schema.json`` has each parameter as a line such as ``integer? 100..999 =pve-vmid``: its type,
``?`` where it may be missing, bounds, ``<=`` a length, ``a|b`` or ``scsi*31`` for choices, ``=`` a format, ``default``
for the option that may leave out its key, ``requires:`` another one, ``~`` a pattern; ``alias:`` another name.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "data" / "proxmox"
#: Numbered options of a VM's and a container's configuration.
NUMBERED = {"ide": 4, "sata": 6, "scsi": 31, "virtio": 16, "unused": 256, "mp": 256, "dev": 256}
UNKNOWN = "property is not defined in schema and the schema does not allow additional properties"

_VOLUME = re.compile(r"[A-Za-z][A-Za-z0-9\-_.]*[A-Za-z0-9]:.+")
#: Formats of text that are looked at; the rest is taken as it is.
FORMATS = {
    "pve-node": re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"),
    "pve-storage-id": re.compile(r"[A-Za-z][A-Za-z0-9\-_.]*[A-Za-z0-9]"),
    "pve-vmid": re.compile(r"[1-9][0-9]{2,8}"),
    "pve-configid": re.compile(r"[A-Za-z][A-Za-z0-9_-]+"),
    "pve-configid-list": re.compile(r"[A-Za-z0-9_, -]+"),
    "pve-storage-content": re.compile(r"images|rootdir|vztmpl|iso|backup|snippets|import|none"),
    "disk-size": re.compile(r"\d+(\.\d+)?([KMGT](iB)?)?"),
    "pve-volume-id": _VOLUME,
    "pve-volume-id-or-qm-path": re.compile(rf"none|cdrom|/.+|{_VOLUME.pattern}|[^/:]+"),
    "pve-volume-id-or-absolute-path": re.compile(rf"/.+|{_VOLUME.pattern}"),
}


@dataclass(frozen=True)
class Spec:
    """What one value has to be."""

    type: str
    optional: bool = False
    least: int | None = None
    most: int | None = None
    longest: int | None = None
    choices: tuple[str, ...] = ()
    format: str = ""
    default: bool = False
    requires: str = ""
    pattern: str = ""
    alias: str = ""


@functools.cache
def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "schema.json").read_text())
    return found


@functools.cache
def spec(line: str) -> Spec:
    if line.startswith("alias:"):
        return Spec("any", optional=True, alias=line.removeprefix("alias:"))
    line, _, pattern = line.partition(" ~")
    kind, *words = line.split(" ")
    values: dict[str, Any] = {"type": kind.removesuffix("?"), "optional": kind.endswith("?"), "pattern": pattern}
    for word in words:
        if word.startswith("="):
            values["format"] = word[1:]
        elif word.startswith("<="):
            values["longest"] = int(word[2:])
        elif word == "default":
            values["default"] = True
        elif word.startswith("requires:"):
            values["requires"] = word.removeprefix("requires:")
        elif re.fullmatch(r"\d*\.\.\d*", word):
            values["least"], values["most"] = (int(part) if part else None for part in word.split(".."))
        else:
            values["choices"] = tuple(_choices(word))
    return Spec(**values)


def _choices(word: str) -> list[str]:
    found = []
    for part in word.split("|"):
        name, star, count = part.partition("*")
        found += [f"{name}{i}" for i in range(int(count))] if star else [name]
    return found


@functools.cache
def options(name: str) -> dict[str, Spec]:
    """The options of a drive string, by the format's name."""
    known, found = load(), dict[str, Spec]()
    for word in known["formats"][name].split():
        if word.startswith("+"):
            found |= options(word[1:])
        else:
            found[word.partition("@")[0]] = spec(known["options"][word])
    return found


def parameters(call: str) -> dict[str, Spec]:
    """The parameters of a call such as ``PUT /nodes/{node}/qemu/{vmid}/config``, those of its path left out."""
    return _properties(load()["calls"][call].get("parameters", {}))


def _properties(lines: dict[str, Any]) -> dict[str, Spec]:
    found = {name: spec(line) for name, line in load()[lines["+"]].items()} if "+" in lines else {}
    plain = {name: line if isinstance(line, str) else line["is"] for name, line in lines.items() if name != "+"}
    return found | {name: spec(line) for name, line in plain.items()}


@functools.cache
def vm_options() -> dict[str, Spec]:
    """What a VM's configuration may say."""
    return _properties(load()["calls"]["GET /nodes/{node}/qemu/{vmid}/config"]["returns"]["of"])


@functools.cache
def container_options() -> dict[str, Spec]:
    """What a container's configuration may say."""
    return _properties(load()["calls"]["GET /nodes/{node}/lxc/{vmid}/config"]["returns"]["of"])


def find(properties: dict[str, Spec], name: str) -> Spec | None:
    """The spec of an option, ``scsi3`` by ``scsi[n]``."""
    if name in properties and "[" not in name:
        return properties[name]
    numbered = re.fullmatch(r"([a-z]+)(\d+)", name)
    if numbered is None or int(numbered[2]) >= NUMBERED.get(numbered[1], 32):
        return None
    return properties.get(f"{numbered[1]}[n]")


def match(verb: str, path: str) -> tuple[str, dict[str, str]] | None:
    """The call that a path is, and the parameters in it; ``None`` for one that the schema does not have."""
    for call in load()["calls"]:
        kind, pattern = call.split(" ")
        regex = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(pattern))
        found = re.fullmatch(regex, path) if kind == verb else None
        if found is not None:
            return call, found.groupdict()
    return None


def wrong(call: str, given: dict[str, str], in_path: dict[str, str]) -> dict[str, str]:
    """What Proxmox VE would find wrong with a request, by parameter."""
    known, errors = parameters(call), dict[str, str]()
    for name, value in in_path.items():
        why = wrong_value(spec(load()["path"][name]), value)
        if why:
            errors[name] = why
    for name, value in given.items():
        one = find(known, name)
        why = UNKNOWN if one is None else wrong_value(one, value)
        if one is not None and one.requires and one.requires not in given:
            why = f"missing property - '{name}' requires this property"
        if why:
            errors[name] = why
    for name, one in known.items():
        if not one.optional and not one.alias and "[" not in name and name not in given:
            errors[name] = "property is missing and it is not optional"
    return errors


def wrong_value(one: Spec, value: str) -> str:
    """Why a value that came as text is not what it should be; empty where it is."""
    if one.type == "boolean":
        good = re.fullmatch(r"1|0|on|off|yes|no|true|false", value, re.IGNORECASE)
        return "" if good else f"type check ('boolean') failed - got '{value}'"
    if one.type in ("integer", "number"):
        good = re.fullmatch(r"-?\d+" if one.type == "integer" else r"-?\d+(\.\d+)?", value)
        if not good:
            return f"type check ('{one.type}') failed - got '{value}'"
        if one.format == "pve-vmid" and not FORMATS["pve-vmid"].fullmatch(value):
            return "invalid format - value does not look like a valid VM ID\n"
        if one.least is not None and float(value) < one.least:
            return f"value must have a minimum value of {one.least}"
        if one.most is not None and float(value) > one.most:
            return f"value must have a maximum value of {one.most}"
        return ""
    return _wrong_text(one, value)


def _wrong_text(one: Spec, value: str) -> str:
    if one.longest is not None and len(value) > one.longest:
        return f"value may only be {one.longest} characters long"
    if one.choices and value not in one.choices:
        return f"value '{value}' does not have a value in the enumeration '{', '.join(one.choices)}'"
    if one.pattern and not re.search(f"^(?:{one.pattern})$", value):
        return "value does not match the regex pattern"
    if one.format in load()["formats"]:
        try:
            properties(one.format, value)
        except ValueError as error:
            return f"invalid format - format error\n{error}\n"
    elif one.format in FORMATS and not FORMATS[one.format].fullmatch(value):
        return f"invalid format - value does not look like a valid {one.format}\n"
    return ""


def properties(name: str, text: str) -> dict[str, str]:
    """A drive string taken apart as PVE::JSONSchema does; raises ValueError where that would die."""
    known, found = options(name), dict[str, str]()
    for part in text.split(","):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        if not equals:
            key, value = next((k for k, one in known.items() if one.default), ""), part
        if not key or not value:
            raise ValueError("missing key in comma-separated list property")
        one = known.get(key)
        if one is not None and one.alias:
            key = one.alias
            one = known[key]
        if one is None:
            raise ValueError(f"{key}: {UNKNOWN}")
        if key in found:
            raise ValueError(f"duplicate key in comma-separated list property: {key}")
        if why := wrong_value(one, value):
            raise ValueError(f"{key}: {why}")
        found[key] = value
    missing = [k for k, one in known.items() if not one.optional and not one.alias and k not in found]
    if missing:
        raise ValueError(f"{missing[0]}: property is missing and it is not optional")
    return found


def wrong_answer(call: str, data: Any) -> list[str]:
    """Where an answer is not what the schema says; Proxmox VE itself answers null for what is optional."""
    return list(_wrong_answer(load()["calls"][call]["returns"], data, "data"))


def _wrong_answer(shape: Any, data: Any, where: str) -> list[str]:
    content: Any = data
    line = shape if isinstance(shape, str) else shape["is"]
    one = spec(line)
    if data is None and (one.optional or one.type in ("null", "any")):
        return []
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float, str),
        "boolean": (int,), "null": (), "any": (object,),
    }  # fmt: skip
    if not isinstance(data, kinds[one.type]):
        return [f"{where} is {type(data).__name__}, not {one.type}"]
    if one.choices and str(data) not in one.choices:
        return [f"{where} is {data!r}"]
    if isinstance(shape, str):
        return []
    if "each" in shape:
        return [why for i, row in enumerate(content) for why in _wrong_answer(shape["each"], row, f"{where}[{i}]")]
    return [why for name, value in _properties_of(shape).items() for why in _wrong_field(name, value, content, where)]


def _properties_of(shape: dict[str, Any]) -> dict[str, Any]:
    of = shape.get("of", {})
    return (load()[of["+"]] if "+" in of else {}) | {name: line for name, line in of.items() if name != "+"}


def _wrong_field(name: str, shape: Any, data: dict[str, Any], where: str) -> list[str]:
    if "[n]" in name:
        stem = name.removesuffix("[n]")
        found = [key for key in data if re.fullmatch(rf"{stem}\d+", key)]
        return [why for key in found for why in _wrong_answer(shape, data[key], f"{where}.{key}")]
    if name in data:
        return _wrong_answer(shape, data[name], f"{where}.{name}")
    line = shape if isinstance(shape, str) else shape["is"]
    return [] if spec(line).optional else [f"{where}.{name} is missing"]
