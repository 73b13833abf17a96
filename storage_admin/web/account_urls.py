"""Pages around one's own account."""

from django.urls import path

from storage_admin.accounts import oidc
from storage_admin.web.pages import second_factor
from storage_admin.web.pages.sign_in import LoginView, LogoutView, PasswordView

urlpatterns = [
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    # By the names that django-allauth knows them by.
    path("login/", LoginView.as_view(), name="account_login"),
    path("logout/", LogoutView.as_view(), name="account_logout"),
    path("password/", PasswordView.as_view(), name="password"),
    *second_factor.urlpatterns,
    *oidc.urlpatterns,
]
