import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models
from django.db.models import OuterRef, Subquery


def name_owners(apps, _schema_editor):  # type: ignore[no-untyped-def]
    """Views that are there already were saved by their users."""
    user = apps.get_model("accounts", "User").objects.filter(pk=OuterRef("user"))
    apps.get_model("accounts", "SavedView").objects.update(by=Subquery(user.values("username")[:1]))


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0003_sessions_refusals_append_only"),
    ]

    operations = [
        migrations.AddField(
            model_name="savedview",
            name="by",
            field=models.CharField(blank=True, default="", max_length=150),
            preserve_default=False,
        ),
        migrations.RunPython(name_owners, migrations.RunPython.noop),
        migrations.AlterField(
            model_name="savedview",
            name="user",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="views",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AddConstraint(
            model_name="savedview",
            constraint=models.UniqueConstraint(
                condition=models.Q(("user", None)), fields=("page", "name"), name="one_view_of_tokens_per_name"
            ),
        ),
        migrations.AddIndex(
            model_name="savedview",
            index=models.Index(condition=models.Q(("shared", True)), fields=["page"], name="view_shared"),
        ),
        migrations.CreateModel(
            name="DefaultView",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("page", models.CharField(max_length=40)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="default_views",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "view",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="default_of",
                        to="accounts.savedview",
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("user", "page"), name="one_default_view_per_page")],
            },
        ),
    ]
