"""Pages around one's own account."""

from django.urls import path

from storage_admin.accounts.views import LoginView, LogoutView, PasswordView

urlpatterns = [
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("password/", PasswordView.as_view(), name="password"),
]
