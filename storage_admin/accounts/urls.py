"""Pages around one's own account."""

from django.contrib.auth.views import LogoutView
from django.urls import path

from storage_admin.accounts.views import LoginView, PasswordView

urlpatterns = [
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("password/", PasswordView.as_view(), name="password"),
]
