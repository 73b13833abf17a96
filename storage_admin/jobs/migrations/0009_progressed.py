from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0008_kinds'),
    ]

    operations = [
        migrations.AddField(
            model_name='job',
            name='progressed',
            field=models.DateTimeField(null=True),
        ),
    ]
