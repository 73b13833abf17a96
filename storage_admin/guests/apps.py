from django.apps import AppConfig


class GuestsConfig(AppConfig):
    name = "storage_admin.guests"
    label = "guests"
