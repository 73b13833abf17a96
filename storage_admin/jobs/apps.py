from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "storage_admin.jobs"
    label = "jobs"
