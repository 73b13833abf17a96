from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "storage_admin.accounts"
    label = "accounts"

    def ready(self) -> None:
        # Needs models, which are there only now.
        from storage_admin.accounts import directory, ldap, second_factor  # noqa: PLC0415

        second_factor.listen()
        ldap.listen()
        directory.mapping()  # a mistake in it is told at the start, not at somebody's sign-in
