"""One address of Redis for redis-py and for Celery."""

import pytest

from storage_admin.brokers import BrokerUrls


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("rediss://:pw@r.example.org:6379/0", "rediss://:pw@r.example.org:6379/0?ssl_cert_reqs=required"),
        ("rediss://r/0?ssl_ca_certs=/ca.pem", "rediss://r/0?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required"),
        ("rediss://r/0?ssl_cert_reqs=none", "rediss://r/0?ssl_cert_reqs=none"),
        ("redis://r/0", "redis://r/0"),
    ],
)
def test_certificates_are_verified_unless_the_address_says_otherwise(given: str, used: str) -> None:
    assert BrokerUrls.parse(given) == BrokerUrls(redis=used, kombu=used)
