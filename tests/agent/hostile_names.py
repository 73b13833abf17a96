"""Names as strangers choose them: each means something to some shell, parser, terminal or page, and nothing here."""

import random
from collections.abc import Callable

LONGEST = 255
_AS_WRITTEN = [
    b"-f", b"-O", b"--help", b"--object", b"-", b"--", b"-c", b"-U.qcow2", b"--image-opts",
    b"nbd:x", b"nbd:127.0.0.1:9", b"nbd:unix:x.sock", b"json:{}", b'json:{"driver":"null-co"}', b"ssh:", b"ssh:x.qcow2",
    b"file:x.qcow2", b"fat:rw:x", b"host_device:x", b"blkdebug::x", b"driver=raw,file.filename=x", b"a,b", b"a,,b",
    b"a,if=none", b"file.filename=x.qcow2", b"\n", b"a\nb.qcow2", b"\r\n", b"\t", b"a\n.qcow2", b" ", b"  lead",
    b"trail ",
    b"\x1b[31mred\x1b[0m", b"\x1b]0;title\x07", b"\x07", b"\x7f", b"\x01\x02\x03", b"\xff", b"\xff\xfe.qcow2",
    b"\xc3\x28",
    b"\xed\xa0\x80", b"\xf0\x9f\x92\xbe", b"\xe2\x80\xaegpj.elif", b"caf\xc3\xa9", b"cafe\xcc\x81", b"\xef\xbb\xbf",
    b"<script>alert(1)</script>", b"<img src=x onerror=alert(1)>", b"&lt;b&gt;", b"{{ 7|add:7 }}", b"{% debug %}",
    b"$(id)", b"`id`", b"$HOME", b"${x}", b"a;id", b"a|id", b"a&id", b"a>x", b"a<x", b"a*b", b"a?b", b"[ab]", b"{a,b}",
    b"~",
    b"~root", b"!!", b"#x", b"a\\b", b"\\", b"\\x00", b"\\n", b"'", b'"', b"'; id; '", b'"; id; "', b"' or 1=1 --",
    b"%s",
    b"%d%n", b"%00", b"%2e%2e%2f", b"%(x)s", b"{0}", b"..x", b"...", b".hidden", b".qcow2", b"x.", b"con", b"nul.qcow2",
    b"C:\\x", b"\\\\host\\share", b"x.qcow2.qcow2", b"x.iso", b"x.vmdk", b"x-flat.vmdk", b"x.journal", b"x.orig",
    b"x.new",
    b".sa", b".sa.qcow2", b"sa-h1.new", b".SA-h1.new", b"fd:3", b"fdset:1", b"1", b"0", b"None", b"null", b"true",
    b"@", b"@list", b"=cmd|' /C calc'!A0", b"+1", b"://", b"http:", b"a:b:c", b":", b"::", b":x", b"lost+found",
    b"deleted (deleted)",
]  # fmt: skip
#: Each as it is, with an extension, and as part of longer ones. What would be a slash is none: no file has it.
KNOWN = [name.replace(b"/", b"|") for name in _AS_WRITTEN]
#: Those of the agent's own files: never taken for an image, and never given to one.
RESERVED = [
    b".sa-h1.new",
    b".sa-h1.orig",
    b".sa-h1.journal",
    b".sa-",
    b".sa-x",
    b".sa-x.qcow2",
    b".sa-" + b"9" * 40 + b".new",
]


def names(chance: random.Random, count: int) -> list[bytes]:
    """That many different names of files: all that are known, and random ones up to the longest."""
    found = dict.fromkeys([*KNOWN, *RESERVED, b"x" * LONGEST, b"y" * (LONGEST - 6) + b".qcow2", b"\xff" * LONGEST])
    makers: list[Callable[[random.Random], bytes]] = [_bytes, _words, _words, _with_extension, _long]
    while len(found) < count:
        name = chance.choice(makers)(chance)
        if name not in {b"", b".", b".."} and not name.startswith(b".sa-"):
            found.setdefault(name)
    return list(found)[:count]


def is_reserved(name: bytes) -> bool:
    """Whether a name is one of the agent's own."""
    return name.startswith(b".sa-")


def _bytes(chance: random.Random) -> bytes:
    return _plain(chance.randbytes(chance.randrange(1, 40)))


def _words(chance: random.Random) -> bytes:
    return _plain(b"".join(chance.choice(KNOWN) for _ in range(chance.randrange(2, 5))))


def _with_extension(chance: random.Random) -> bytes:
    return _plain(_words(chance)[: LONGEST - 6] + chance.choice((b".qcow2", b".raw", b".img", b".QCOW2")))


def _long(chance: random.Random) -> bytes:
    return _plain(_words(chance) * LONGEST)[:LONGEST]


def _plain(name: bytes) -> bytes:
    return name.replace(b"/", b"|").replace(b"\0", b"\1")[:LONGEST]
