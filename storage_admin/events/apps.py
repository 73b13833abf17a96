from django.apps import AppConfig


class EventsConfig(AppConfig):
    name = "storage_admin.events"
    label = "events"
