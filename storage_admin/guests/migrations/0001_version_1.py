import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('guests', '0001_initial'),
        ('guests', '0002_records_chain'),
        ('guests', '0003_facts_of_every_kind'),
        ('guests', '0004_hidden_lines'),
        ('guests', '0005_guest_spans'),
        ('guests', '0006_waiting_disks'),
    ]

    initial = True

    dependencies = [
        ('hosts', '0001_version_1'),
    ]

    operations = [
        migrations.CreateModel(
            name='Guest',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('domain', 'Domain'), ('vm', 'Vm'), ('container', 'Container')], max_length=10)),
                ('uid', models.CharField(max_length=100)),
                ('name', models.CharField(max_length=255)),
                ('state', models.CharField(max_length=20)),
                ('io_priority', models.SmallIntegerField(null=True)),
                ('io_weight', models.IntegerField(null=True)),
                ('io_limits', models.JSONField(blank=True, default=dict)),
                ('lock', models.CharField(blank=True, max_length=100)),
                ('unread', models.JSONField(blank=True, default=list)),
                ('digest', models.CharField(blank=True, max_length=40)),
                ('accepted_digest', models.CharField(blank=True, max_length=40)),
                ('waiting', models.JSONField(blank=True, default=list)),
                ('last_seen', models.DateTimeField()),
                ('host', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='guests', to='hosts.host')),
            ],
            options={
                'ordering': ['name', 'id'],
            },
        ),
        migrations.CreateModel(
            name='GuestDisk',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('target', models.CharField(max_length=40)),
                ('device', models.CharField(default='disk', max_length=10)),
                ('path', models.TextField(blank=True)),
                ('path_bytes', models.BinaryField(default=b'')),
                ('path_key', models.CharField(blank=True, db_index=True, max_length=32)),
                ('dev', models.CharField(blank=True, max_length=20)),
                ('inode', models.CharField(blank=True, max_length=20)),
                ('format', models.CharField(blank=True, max_length=20)),
                ('cache', models.CharField(blank=True, max_length=20)),
                ('discard', models.CharField(blank=True, max_length=20)),
                ('readonly', models.BooleanField(default=False)),
                ('records_chain', models.BooleanField(default=False)),
                ('volume', models.TextField(blank=True)),
                ('only_in', models.CharField(blank=True, max_length=100)),
                ('guest', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='disks', to='guests.guest')),
            ],
            options={
                'ordering': ['guest', 'target', 'only_in'],
            },
        ),
        migrations.CreateModel(
            name='GuestSpan',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('domain', 'Domain'), ('vm', 'Vm'), ('container', 'Container')], max_length=10)),
                ('uid', models.CharField(max_length=100)),
                ('ran', models.BooleanField()),
                ('since', models.FloatField()),
                ('until', models.FloatField()),
                ('host', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='hosts.host')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.AddConstraint(
            model_name='guest',
            constraint=models.UniqueConstraint(fields=('host', 'kind', 'uid'), name='guest_once_per_host'),
        ),
        migrations.AddConstraint(
            model_name='guestdisk',
            constraint=models.UniqueConstraint(fields=('guest', 'target', 'only_in'), name='disk_once_per_guest'),
        ),
        migrations.AddIndex(
            model_name='guestspan',
            index=models.Index(fields=['host', 'kind', 'uid', '-id'], name='span_of_guest'),
        ),
    ]
