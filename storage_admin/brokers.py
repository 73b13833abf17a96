"""One address of Redis, in the two spellings that redis-py and kombu want."""

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class BrokerUrls:
    """The same Redis for redis-py (``redis``) and for Celery's transport (``kombu``)."""

    redis: str
    kombu: str

    @classmethod
    def parse(cls, url: str) -> "BrokerUrls":
        """Reads ``redis://…``, ``rediss://…``, ``unix:///path`` or ``redis+socket:///path``.

        Certificates are verified unless the address says otherwise; ``?ssl_ca_certs=FILE`` names who has signed them.

        Raises:
            ValueError: it is none of these.
        """
        parts = urlsplit(url)
        if parts.scheme == "rediss" and "ssl_cert_reqs" not in parse_qs(parts.query):
            # kombu would take any certificate, and say so in a warning.
            url += ("&" if parts.query else "?") + "ssl_cert_reqs=required"
        if parts.scheme in {"redis", "rediss"}:
            return cls(redis=url, kombu=url)
        if parts.scheme in {"unix", "redis+socket"} and parts.path.startswith("/"):
            query = parse_qs(parts.query)
            number = (query.get("db") or query.get("virtual_host") or ["0"])[0]
            return cls(
                redis=f"unix://{parts.path}?db={number}", kombu=f"redis+socket://{parts.path}?virtual_host={number}"
            )
        raise ValueError(f"REDIS_URL {url!r} is neither redis://, rediss:// nor unix:///path.")
