from django.apps import AppConfig

from storage_admin.accounts import scopes


class HostsConfig(AppConfig):
    name = "storage_admin.hosts"
    label = "hosts"

    def ready(self) -> None:
        # Models are there only from here on.
        from storage_admin.hosts.selectors import host_names  # noqa: PLC0415

        scopes.register(host_names)
