"""Policies say what to do with preallocated images; what was analyzed before that was looked at is analyzed anew."""

from typing import Any

from django.db import migrations, models


def look_again(apps: Any, _schema: Any) -> None:
    """A fingerprint that no file has: the next background sample looks at each of these images again."""
    images = apps.get_model("images", "Image")._base_manager
    images.filter(declared_format__in=["qcow2", "raw"], analyzed_at__isnull=False).update(analyzed_fingerprint=b"")


class Migration(migrations.Migration):
    dependencies = [("images", "0009_aside_job_index")]

    operations = [
        migrations.AddField("policy", "include_preallocated", models.BooleanField(default=False, db_default=False)),
        migrations.RunPython(look_again, migrations.RunPython.noop),
    ]
