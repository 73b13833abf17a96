from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("guests", "0005_guest_spans")]

    operations = [
        migrations.AddField(
            model_name="guest", name="waiting", field=models.JSONField(blank=True, default=list)
        ),
    ]
