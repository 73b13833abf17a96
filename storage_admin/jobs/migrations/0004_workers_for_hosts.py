from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("jobs", "0003_kept_with_a_job"),
    ]

    operations = [
        migrations.AddField(
            model_name="worker",
            name="host",
            field=models.CharField(blank=True, default="", max_length=50),
        ),
        migrations.AddField(
            model_name="worker",
            name="general",
            field=models.BooleanField(default=True),
        ),
        migrations.AddField(
            model_name="worker",
            name="place",
            field=models.CharField(blank=True, default="", max_length=200),
        ),
    ]
