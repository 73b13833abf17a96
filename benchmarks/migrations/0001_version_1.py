import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('benchmarks', '0001_initial'),
    ]

    initial = True

    dependencies = [
        ('hosts', '0001_version_1'),
        ('jobs', '0001_version_1'),
    ]

    operations = [
        migrations.CreateModel(
            name='Benchmark',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('source', models.CharField(choices=[('run', 'run'), ('pasted', 'pasted')], default='run', max_length=6)),
                ('kind', models.CharField(choices=[('dd', 'dd'), ('bonnie', 'bonnie++'), ('fio', 'fio'), ('preallocation', 'preallocation'), ('cluster_size', 'cluster size'), ('formats', 'formats and chains'), ('modes', 'cache and AIO modes'), ('boot', 'boot storm')], max_length=20)),
                ('quick', models.BooleanField(default=True)),
                ('label', models.CharField(blank=True, max_length=200)),
                ('options', models.JSONField(default=dict)),
                ('steps', models.JSONField(default=list)),
                ('profile_key', models.CharField(blank=True, max_length=40)),
                ('environment', models.JSONField(default=dict)),
                ('environment_after', models.JSONField(default=dict)),
                ('notes', models.JSONField(default=list)),
                ('caches', models.CharField(blank=True, choices=[('dropped', 'caches dropped'), ('direct', 'direct, bypassing the page cache'), ('not dropped', 'caches not dropped')], max_length=12)),
                ('regressions', models.JSONField(default=list)),
                ('created_by', models.CharField(max_length=150)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('finished', models.DateTimeField(null=True)),
                ('host', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='benchmarks', to='hosts.host')),
                ('job', models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='benchmark', to='jobs.job')),
                ('pool', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='benchmarks', to='hosts.storagepool')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Sample',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('step', models.PositiveIntegerField(null=True)),
                ('setting', models.JSONField(default=dict)),
                ('metric', models.CharField(max_length=40)),
                ('unit', models.CharField(max_length=8)),
                ('value', models.FloatField(null=True)),
                ('note', models.CharField(blank=True, max_length=200)),
                ('repetition', models.PositiveIntegerField(default=1)),
                ('benchmark', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='samples', to='benchmarks.benchmark')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='Watch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('dd', 'dd'), ('bonnie', 'bonnie++'), ('fio', 'fio'), ('preallocation', 'preallocation'), ('cluster_size', 'cluster size'), ('formats', 'formats and chains'), ('modes', 'cache and AIO modes'), ('boot', 'boot storm')], max_length=20)),
                ('every_hours', models.PositiveIntegerField(default=24)),
                ('last_started', models.DateTimeField(null=True)),
                ('problem', models.TextField(blank=True)),
                ('created_by', models.CharField(max_length=150)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='benchmark_watches', to='hosts.storagepool')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.AddIndex(
            model_name='benchmark',
            index=models.Index(fields=['pool', 'kind', 'profile_key', '-id'], name='benchmarks__pool_id_66cd30_idx'),
        ),
        migrations.AddConstraint(
            model_name='watch',
            constraint=models.UniqueConstraint(fields=('pool', 'kind'), name='one_watch_per_pool_and_kind'),
        ),
    ]
