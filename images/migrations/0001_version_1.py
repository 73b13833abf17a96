import django.db.models.deletion
import django.db.models.manager
import django.utils.timezone
import images.indexes
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('images', '0001_initial'),
        ('images', '0002_filter_index'),
        ('images', '0003_sizes_unknown'),
        ('images', '0004_policies'),
        ('images', '0005_policy_runs'),
        ('images', '0007_set_aside'),
        ('images', '0008_policy_choosers'),
        ('images', '0009_aside_job_index'),
        ('images', '0010_preallocated'),
        ('images', '0011_broken_offers_nothing'),
    ]

    initial = True

    dependencies = [
        ('guests', '0001_version_1'),
        ('hosts', '0001_version_1'),
        ('jobs', '0001_version_1'),
    ]

    operations = [
        migrations.CreateModel(
            name='Policy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('enabled', models.BooleanField(default=True)),
                ('cron', models.CharField(max_length=100)),
                ('timezone', models.CharField(default='UTC', max_length=64)),
                ('window_minutes', models.PositiveIntegerField(default=360)),
                ('quiet_minutes', models.PositiveIntegerField(default=30)),
                ('hosts', models.JSONField(blank=True, default=list)),
                ('pools', models.JSONField(blank=True, default=list)),
                ('name_pattern', models.CharField(blank=True, max_length=500)),
                ('formats', models.JSONField(blank=True, default=list)),
                ('min_reclaimable_bytes', models.BigIntegerField(default=0)),
                ('min_reclaimable_percent', models.PositiveSmallIntegerField(default=0)),
                ('min_age_hours', models.PositiveIntegerField(default=0)),
                ('min_chain_depth', models.PositiveIntegerField(default=1)),
                ('include_decayed', models.BooleanField(default=False)),
                ('include_preallocated', models.BooleanField(db_default=False, default=False)),
                ('kind', models.CharField(default='reclaim', max_length=30)),
                ('options', models.JSONField(blank=True, default=dict)),
                ('max_jobs_per_host', models.PositiveSmallIntegerField(default=1)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('created_by', models.CharField(max_length=150)),
                ('clock', models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                'verbose_name_plural': 'policies',
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='Image',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('path', models.TextField()),
                ('name', models.CharField(max_length=1100)),
                ('path_bytes', models.BinaryField()),
                ('path_key', models.CharField(max_length=32)),
                ('fingerprint', models.BinaryField(max_length=16)),
                ('dev', models.CharField(max_length=20)),
                ('inode', models.CharField(max_length=20)),
                ('nlink', models.PositiveIntegerField(default=1)),
                ('mtime_ns', models.BigIntegerField()),
                ('ctime_ns', models.BigIntegerField()),
                ('file_size', models.BigIntegerField(null=True)),
                ('allocated_size', models.BigIntegerField(null=True)),
                ('virtual_size', models.BigIntegerField(null=True)),
                ('format', models.CharField(max_length=20)),
                ('declared_format', models.CharField(blank=True, max_length=20)),
                ('declared_by', models.CharField(blank=True, max_length=40)),
                ('admin_format', models.CharField(blank=True, max_length=20)),
                ('cluster_size', models.BigIntegerField(null=True)),
                ('compression', models.CharField(blank=True, max_length=10)),
                ('preallocation', models.CharField(blank=True, max_length=10)),
                ('encrypted', models.BooleanField(null=True)),
                ('header', models.JSONField(default=dict)),
                ('snapshots', models.JSONField(default=list)),
                ('backing_file', models.TextField(blank=True)),
                ('backing_format', models.CharField(blank=True, max_length=20)),
                ('backing_key', models.CharField(blank=True, max_length=32)),
                ('backing_path', models.TextField(blank=True)),
                ('backing_path_bytes', models.BinaryField(default=b'')),
                ('backing_found', models.CharField(blank=True, max_length=41)),
                ('backing_unsafe', models.TextField(blank=True)),
                ('root_id', models.BigIntegerField(db_index=True, null=True)),
                ('chain_depth', models.PositiveIntegerField(default=1)),
                ('overlays_count', models.PositiveIntegerField(default=0)),
                ('in_use', models.BooleanField(null=True)),
                ('in_use_detail', models.TextField(blank=True)),
                ('held', models.CharField(blank=True, max_length=200)),
                ('orphan', models.BooleanField(null=True)),
                ('orphan_evidence', models.JSONField(default=list)),
                ('state', models.CharField(choices=[('ok', 'Ok'), ('missing', 'Missing'), ('chain_broken', 'chain broken'), ('chain_cycle', 'chain cycle'), ('outside_pool', 'base outside every pool'), ('format_mismatch', 'format mismatch'), ('unreadable', 'Unreadable'), ('modifying', 'Modifying'), ('set_aside', 'set aside'), ('deleted', 'Deleted')], default='ok', max_length=16)),
                ('state_detail', models.TextField(blank=True)),
                ('unreadable', models.TextField(blank=True)),
                ('reclaimable_bytes', models.BigIntegerField(null=True)),
                ('reclaimable_low', models.BigIntegerField(null=True)),
                ('reclaimable_high', models.BigIntegerField(null=True)),
                ('reclaimable_method', models.CharField(blank=True, max_length=20)),
                ('estimate', models.JSONField(null=True)),
                ('analyzed_at', models.DateTimeField(null=True)),
                ('analyzed_fingerprint', models.BinaryField(default=b'', max_length=16)),
                ('first_seen', models.DateTimeField()),
                ('seen', models.DateTimeField()),
                ('missing_since', models.DateTimeField(null=True)),
                ('aside_since', models.DateTimeField(null=True)),
                ('aside_until', models.DateTimeField(null=True)),
                ('aside_by', models.CharField(blank=True, db_default='', default='', max_length=150)),
                ('deleted_at', models.DateTimeField(null=True)),
                ('listed', models.BooleanField(default=False)),
                ('changed_scan', models.BigIntegerField(default=0)),
                ('aside_job', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='jobs.job')),
                ('backing', models.ForeignKey(db_constraint=False, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='overlays', to='images.image')),
                ('host', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='images', to='hosts.host')),
                ('pool', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='images', to='hosts.storagepool')),
            ],
            options={
                'ordering': ['name', 'id'],
                'base_manager_name': 'every',
                'default_manager_name': 'objects',
            },
            managers=[
                ('objects', django.db.models.manager.Manager()),
                ('every', django.db.models.manager.Manager()),
            ],
        ),
        migrations.CreateModel(
            name='ImageSample',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('virtual_size', models.BigIntegerField(null=True)),
                ('allocated_size', models.BigIntegerField(null=True)),
                ('file_size', models.BigIntegerField(null=True)),
                ('image', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='samples', to='images.image')),
            ],
            options={
                'ordering': ['at'],
            },
        ),
        migrations.CreateModel(
            name='ImageUse',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('disk', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='use', to='guests.guestdisk')),
                ('image', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='uses', to='images.image')),
            ],
        ),
        migrations.CreateModel(
            name='PolicyRun',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('due', models.DateTimeField()),
                ('ends', models.DateTimeField()),
                ('state', models.CharField(choices=[('running', 'Running'), ('finished', 'Finished'), ('missed', 'Missed'), ('stopped', 'Stopped'), ('failed', 'Failed')], default='running', max_length=10)),
                ('detail', models.TextField(blank=True)),
                ('rules', models.JSONField(default=dict)),
                ('by', models.CharField(max_length=150)),
                ('by_hand', models.BooleanField(default=False)),
                ('started', models.DateTimeField(default=django.utils.timezone.now)),
                ('chosen_at', models.DateTimeField(null=True)),
                ('chooser', models.CharField(blank=True, default='', max_length=40)),
                ('chooser_since', models.DateTimeField(null=True)),
                ('left_out', models.JSONField(default=dict)),
                ('finished', models.DateTimeField(null=True)),
                ('policy', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='images.policy')),
            ],
            options={
                'ordering': ['-due', '-id'],
            },
        ),
        migrations.CreateModel(
            name='PolicyPick',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('place', models.PositiveIntegerField(default=0)),
                ('label', models.TextField()),
                ('state', models.CharField(choices=[('chosen', 'Chosen'), ('submitted', 'Submitted'), ('succeeded', 'Succeeded'), ('failed', 'Failed'), ('skipped', 'Skipped')], default='chosen', max_length=10)),
                ('code', models.CharField(blank=True, max_length=40)),
                ('reason', models.TextField(blank=True)),
                ('predicted_bytes', models.BigIntegerField(null=True)),
                ('host', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='hosts.host')),
                ('image', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='policy_picks', to='images.image')),
                ('job', models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='policy_pick', to='jobs.job')),
                ('pool', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='hosts.storagepool')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='picks', to='images.policyrun')),
            ],
            options={
                'ordering': ['run', 'place', 'id'],
            },
        ),
        migrations.CreateModel(
            name='Claim',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('number', 'Number'), ('file', 'File'), ('any', 'Any')], max_length=10)),
                ('key', models.CharField(blank=True, max_length=100)),
                ('why', models.TextField()),
                ('host', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='claims', to='hosts.host')),
            ],
            options={
                'ordering': ['host', 'kind', 'key'],
                'constraints': [models.UniqueConstraint(fields=('host', 'kind', 'key'), name='claim_once_per_host')],
            },
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['name', 'id'], name='image_by_name'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['allocated_size', 'id'], name='image_by_allocated_size'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['reclaimable_bytes', 'id'], name='image_by_reclaimable_bytes'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=images.indexes.FilterIndex(fields=['path', 'listed', 'declared_format', 'format', 'state', 'in_use', 'orphan', 'chain_depth', 'virtual_size', 'reclaimable_bytes', 'host', 'pool'], name='image_filters'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['pool', 'listed'], name='image_by_pool'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['host', 'changed_scan'], name='image_by_scan'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(fields=['host', 'dev', 'inode'], name='image_by_inode'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(condition=models.Q(('orphan', True)), fields=['id'], name='image_orphans'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(condition=models.Q(('state', 'ok'), _negated=True), fields=['id'], name='image_not_ok'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(condition=models.Q(('aside_since__isnull', False)), fields=['host'], name='image_aside'),
        ),
        migrations.AddIndex(
            model_name='image',
            index=models.Index(condition=models.Q(('aside_job__isnull', False)), fields=['aside_job'], name='image_aside_job'),
        ),
        migrations.AddConstraint(
            model_name='image',
            constraint=models.UniqueConstraint(fields=('host', 'path_key'), name='image_path_once_per_host'),
        ),
        migrations.AddIndex(
            model_name='imagesample',
            index=models.Index(fields=['image', 'at'], name='images_imag_image_i_08be18_idx'),
        ),
        migrations.AddIndex(
            model_name='policyrun',
            index=models.Index(fields=['state'], name='images_poli_state_a2b764_idx'),
        ),
        migrations.AddConstraint(
            model_name='policyrun',
            constraint=models.UniqueConstraint(fields=('policy', 'due'), name='one_run_per_policy_and_due_time'),
        ),
        migrations.AddIndex(
            model_name='policypick',
            index=models.Index(fields=['run', 'state'], name='images_poli_run_id_f110bc_idx'),
        ),
        migrations.AddIndex(
            model_name='policypick',
            index=models.Index(fields=['run', 'place'], name='images_poli_run_id_93b209_idx'),
        ),
    ]
