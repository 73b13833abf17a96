from django.core.management import call_command
from django.db import migrations, models


def make_cache(apps, schema_editor):
    """The table of the setting CACHES, which no model describes."""
    call_command('createcachetable', database=schema_editor.connection.alias, verbosity=0)


def drop_cache(apps, schema_editor):
    schema_editor.execute('DROP TABLE cache')


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0004_default_views'),
    ]

    operations = [
        migrations.CreateModel(
            name='SignInRules',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('second_factor_roles', models.JSONField(blank=True, default=list)),
            ],
        ),
        migrations.RunPython(make_cache, drop_cache),
    ]
