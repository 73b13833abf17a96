from django.apps import AppConfig


class HostsConfig(AppConfig):
    name = "storage_admin.hosts"
    label = "hosts"
