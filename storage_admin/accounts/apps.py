from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "storage_admin.accounts"
    label = "accounts"
