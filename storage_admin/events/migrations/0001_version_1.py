import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('events', '0001_initial'),
        ('events', '0002_deliveries_and_rotation'),
        ('events', '0003_told_under_each_host'),
    ]

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Event',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=40)),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('host', models.CharField(blank=True, max_length=50)),
                ('data', models.JSONField(default=dict)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Webhook',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('url', models.CharField(max_length=500)),
                ('secret_locked', models.BinaryField()),
                ('old_secret_locked', models.BinaryField(default=b'')),
                ('old_secret_until', models.DateTimeField(null=True)),
                ('events', models.JSONField(blank=True, default=list)),
                ('enabled', models.BooleanField(default=True)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('created_by', models.CharField(max_length=150)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Alert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=200)),
                ('kind', models.CharField(max_length=40)),
                ('severity', models.CharField(choices=[('danger', 'Danger'), ('warning', 'Warning')], max_length=10)),
                ('title', models.CharField(max_length=200)),
                ('detail', models.TextField(blank=True)),
                ('host', models.CharField(blank=True, max_length=50)),
                ('told_under', models.CharField(blank=True, max_length=50)),
                ('target_kind', models.CharField(blank=True, max_length=10)),
                ('target_id', models.BigIntegerField(null=True)),
                ('target_label', models.TextField(blank=True)),
                ('opened', models.DateTimeField(default=django.utils.timezone.now)),
                ('updated', models.DateTimeField(default=django.utils.timezone.now)),
                ('closed', models.DateTimeField(null=True)),
                ('acknowledged', models.DateTimeField(null=True)),
                ('acknowledged_by', models.CharField(blank=True, max_length=150)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['kind', 'opened'], name='events_aler_kind_41aa5e_idx')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('closed__isnull', True)), fields=('key',), name='one_open_alert_per_key')],
            },
        ),
        migrations.CreateModel(
            name='Delivery',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('recipients', models.JSONField(blank=True, default=list)),
                ('state', models.CharField(choices=[('due', 'Due'), ('sent', 'Sent'), ('given_up', 'given up')], default='due', max_length=10)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('next_try', models.DateTimeField(default=django.utils.timezone.now)),
                ('generation', models.PositiveIntegerField(default=0)),
                ('tried', models.DateTimeField(null=True)),
                ('status_code', models.PositiveSmallIntegerField(null=True)),
                ('problem', models.TextField(blank=True)),
                ('sent', models.DateTimeField(null=True)),
                ('event', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='events.event')),
                ('webhook', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='events.webhook')),
            ],
            options={
                'verbose_name_plural': 'deliveries',
                'ordering': ['-id'],
                'indexes': [models.Index(condition=models.Q(('state', 'due')), fields=['next_try'], name='delivery_due')],
            },
        ),
    ]
