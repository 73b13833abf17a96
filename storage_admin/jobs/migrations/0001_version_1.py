import django.db.models.deletion
import django.utils.timezone
import storage_admin.jobs.models
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('jobs', '0001_initial'),
        ('jobs', '0002_waiting_for_guests'),
        ('jobs', '0003_kept_with_a_job'),
        ('jobs', '0004_workers_for_hosts'),
        ('jobs', '0005_automation'),
        ('jobs', '0006_ledger'),
        ('jobs', '0007_ledger_of_earlier_jobs'),
        ('jobs', '0008_kinds'),
        ('jobs', '0009_progressed'),
        ('jobs', '0010_space_pool_index'),
        ('jobs', '0011_indexes'),
        ('jobs', '0012_stalled_since'),
        ('jobs', '0013_elapsed'),
        ('jobs', '0014_unlock_due'),
        ('jobs', '0015_made_bytes'),
    ]

    initial = True

    dependencies = [
        ('hosts', '0001_version_1'),
    ]

    operations = [
        migrations.CreateModel(
            name='Automation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('paused', models.BooleanField(default=False)),
                ('by', models.CharField(blank=True, max_length=150)),
                ('reason', models.CharField(blank=True, max_length=300)),
                ('since', models.DateTimeField(default=django.utils.timezone.now)),
            ],
        ),
        migrations.CreateModel(
            name='Elapsed',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('boot_id', models.CharField(max_length=40, unique=True)),
                ('boottime', models.FloatField()),
                ('seconds', models.FloatField()),
                ('offset', models.FloatField()),
                ('jumped_at', models.FloatField(null=True)),
                ('jump', models.FloatField(default=0.0)),
            ],
        ),
        migrations.CreateModel(
            name='Worker',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('host', models.CharField(blank=True, default='', max_length=50)),
                ('general', models.BooleanField(default=True)),
                ('place', models.CharField(blank=True, default='', max_length=200)),
                ('started', models.DateTimeField(default=django.utils.timezone.now)),
                ('seen', models.DateTimeField(default=django.utils.timezone.now)),
            ],
        ),
        migrations.CreateModel(
            name='Job',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('uid', models.CharField(default=storage_admin.jobs.models._uid, max_length=40, unique=True)),
                ('kind', models.CharField(max_length=30)),
                ('state', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('succeeded', 'Succeeded'), ('failed', 'Failed'), ('cancelled', 'Cancelled'), ('interrupted', 'Interrupted')], default='queued', max_length=12)),
                ('waiting_for', models.CharField(blank=True, max_length=200)),
                ('rewrites', models.BooleanField(default=False)),
                ('target_kind', models.CharField(max_length=10)),
                ('target_id', models.BigIntegerField()),
                ('target_label', models.TextField(blank=True)),
                ('options', models.JSONField(default=dict)),
                ('plan', models.JSONField(default=dict)),
                ('result', models.JSONField(null=True)),
                ('error_code', models.CharField(blank=True, max_length=40)),
                ('error_detail', models.TextField(blank=True)),
                ('generation', models.PositiveIntegerField(default=0)),
                ('worker', models.CharField(blank=True, max_length=100)),
                ('heartbeat', models.DateTimeField(null=True)),
                ('cancel_requested', models.BooleanField(default=False)),
                ('progress', models.FloatField(default=0.0)),
                ('stage', models.CharField(blank=True, max_length=40)),
                ('message', models.TextField(blank=True)),
                ('done_bytes', models.BigIntegerField(null=True)),
                ('total_bytes', models.BigIntegerField(null=True)),
                ('progressed', models.DateTimeField(null=True)),
                ('stalled_since', models.DateTimeField(null=True)),
                ('bytes_per_sec', models.BigIntegerField(null=True)),
                ('eta_seconds', models.BigIntegerField(null=True)),
                ('commands', models.JSONField(default=list)),
                ('created_by', models.CharField(max_length=150)),
                ('created', models.DateTimeField(default=django.utils.timezone.now)),
                ('rung', models.DateTimeField(default=django.utils.timezone.now)),
                ('started', models.DateTimeField(null=True)),
                ('finished', models.DateTimeField(null=True)),
                ('undo_state', models.CharField(choices=[('none', 'None'), ('available', 'Available'), ('undone', 'Undone'), ('discarded', 'Discarded'), ('expired', 'Expired'), ('missing', 'deleted by somebody else')], default='none', max_length=10)),
                ('undo_expires', models.DateTimeField(null=True)),
                ('undo_bytes', models.BigIntegerField(default=0)),
                ('undo_due', models.FloatField(null=True)),
                ('undo_seen', models.JSONField(default=list)),
                ('needs_recovery', models.BooleanField(default=False)),
                ('parked_at', models.DateTimeField(null=True)),
                ('wait_until', models.DateTimeField(null=True)),
                ('waited_guests', models.JSONField(default=list)),
                ('start_due', models.BooleanField(default=False)),
                ('kept', models.JSONField(default=dict)),
                ('repoint_due', models.BooleanField(default=False)),
                ('unlock_due', models.BooleanField(default=False)),
                ('host_name', models.CharField(blank=True, default='', max_length=200)),
                ('pool_name', models.CharField(blank=True, default='', max_length=200)),
                ('predicted_bytes', models.BigIntegerField(null=True)),
                ('before_bytes', models.BigIntegerField(null=True)),
                ('after_bytes', models.BigIntegerField(null=True)),
                ('made_bytes', models.BigIntegerField(null=True)),
                ('freed_bytes', models.BigIntegerField(null=True)),
                ('freed_at', models.DateTimeField(null=True)),
                ('freed_month', models.CharField(blank=True, default='', max_length=7)),
                ('host', models.ForeignKey(db_constraint=False, db_index=False, on_delete=storage_admin.jobs.models.forget_all_but_the_ledger, related_name='jobs', to='hosts.host')),
                ('space_pool', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='hosts.storagepool')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='IdempotentAnswer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('actor', models.CharField(max_length=150)),
                ('key', models.CharField(max_length=255)),
                ('request_digest', models.CharField(max_length=64)),
                ('created', models.DateTimeField(auto_now_add=True)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='jobs.job')),
            ],
        ),
        migrations.CreateModel(
            name='JobLog',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('level', models.CharField(choices=[('info', 'Info'), ('warning', 'Warning'), ('error', 'Error'), ('command', 'Command')], default='info', max_length=8)),
                ('text', models.TextField()),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='log_lines', to='jobs.job')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.CreateModel(
            name='ResourceLock',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=600)),
                ('exclusive', models.BooleanField()),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='locks', to='jobs.job')),
            ],
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['state', 'rung'], name='jobs_job_state_76c583_idx'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['host', 'state'], name='jobs_job_host_id_fe7b73_idx'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['undo_state', 'host'], name='job_undo_host'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['kind', 'state', '-id'], name='job_kind_state'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['target_kind', 'target_id', '-id'], name='jobs_job_target__38d57c_idx'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['created', 'created_by', 'host'], name='job_created'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(fields=['state', 'created', 'created_by', 'host'], name='job_state_created'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('undo_state', 'available')), fields=['undo_expires'], name='job_undo_due'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('parked_at__isnull', False), ('state', 'queued')), fields=['parked_at'], name='job_parked'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('start_due', True)), fields=['id'], name='job_start_due'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('repoint_due', True)), fields=['id'], name='job_repoint_due'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('unlock_due', True)), fields=['id'], name='job_unlock_due'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('needs_recovery', True)), fields=['id'], name='job_needs_recovery'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('space_pool__isnull', False)), fields=['space_pool'], name='job_space_pool'),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('freed_bytes__isnull', False)), fields=['host', 'space_pool', 'freed_month', 'freed_at', 'finished', 'id', 'kind', 'created_by', 'target_kind', 'target_id', 'undo_state', 'undo_bytes', 'freed_bytes', 'before_bytes', 'after_bytes', 'made_bytes', 'predicted_bytes', 'started'], name='job_ledger'),
        ),
        migrations.AddConstraint(
            model_name='idempotentanswer',
            constraint=models.UniqueConstraint(fields=('actor', 'key'), name='one_answer_per_idempotency_key'),
        ),
        migrations.AddIndex(
            model_name='resourcelock',
            index=models.Index(fields=['key'], name='jobs_resour_key_1f08e4_idx'),
        ),
        migrations.AddConstraint(
            model_name='resourcelock',
            constraint=models.UniqueConstraint(condition=models.Q(('exclusive', True)), fields=('key',), name='one_writer_per_resource'),
        ),
        migrations.AddConstraint(
            model_name='resourcelock',
            constraint=models.UniqueConstraint(fields=('job', 'key'), name='one_lock_per_job_and_resource'),
        ),
    ]
