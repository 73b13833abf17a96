"""People who sign in by the page that asks for a password."""

from django.test import Client

PASSWORD = "correct horse battery staple"


def signed_in(name: str = "bob", password: str = PASSWORD, **about: str) -> Client:
    """A browser of somebody who has given the right password; ``about`` it are headers and an address."""
    client = Client(**about)  # type: ignore[arg-type]
    sign_in(client, name, password)
    return client


def sign_in(client: Client, name: str = "bob", password: str = PASSWORD, **more: str) -> str:
    """Where the page sends to then."""
    answer = client.post("/login/", {"username": name, "password": password} | more)
    assert answer.status_code == 302, answer.content
    return str(answer["Location"])


def is_in(client: Client) -> bool:
    return client.get("/jobs/").status_code == 200
