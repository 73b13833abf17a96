import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    #: What earlier versions had in its place: a database with all of these goes on, one with some of them is refused.
    replaces = [
        ('hosts', '0001_initial'),
        ('hosts', '0002_speed'),
        ('hosts', '0003_reached_by_ssh'),
        ('hosts', '0004_plain_commands'),
        ('hosts', '0005_proxmox_nodes'),
        ('hosts', '0006_pool_thresholds'),
        ('hosts', '0007_reserved'),
        ('hosts', '0008_share_bases'),
        ('hosts', '0009_folders_kept'),
        ('hosts', '0010_leftovers'),
        ('hosts', '0011_key_pairs'),
    ]

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Host',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('slug', models.SlugField(unique=True)),
                ('name', models.CharField(max_length=200)),
                ('kind', models.CharField(choices=[('local', 'Local'), ('ssh', 'Ssh'), ('libvirt', 'Libvirt'), ('proxmox', 'Proxmox')], max_length=10)),
                ('address', models.CharField(blank=True, max_length=255)),
                ('port', models.PositiveIntegerField(blank=True, null=True)),
                ('user', models.CharField(blank=True, max_length=64)),
                ('transport', models.CharField(blank=True, choices=[('local', 'this machine'), ('ssh', 'Ssh'), ('forced', 'ssh, with a key that can only run the agent'), ('plain', 'ssh, plain commands (no Python 3 there)'), ('tls', 'TLS'), ('api', 'the API alone'), ('api+ssh', 'the API and ssh')], max_length=20)),
                ('host_key', models.TextField(blank=True)),
                ('private_key_locked', models.BinaryField(default=b'')),
                ('token_id', models.CharField(blank=True, max_length=200)),
                ('token_locked', models.BinaryField(default=b'')),
                ('node', models.CharField(blank=True, max_length=100)),
                ('ssh_port', models.PositiveIntegerField(blank=True, null=True)),
                ('tls_fingerprint', models.CharField(blank=True, max_length=100)),
                ('cluster', models.CharField(blank=True, max_length=100)),
                ('status', models.CharField(choices=[('ok', 'Ok'), ('unreachable', 'Unreachable'), ('degraded', 'Degraded')], default='degraded', max_length=12)),
                ('status_detail', models.TextField(blank=True, default='It has not been scanned yet.')),
                ('last_seen', models.DateTimeField(blank=True, null=True)),
                ('capabilities', models.JSONField(blank=True, default=dict)),
                ('max_jobs', models.PositiveSmallIntegerField(default=1)),
                ('bandwidth_bytes_sec', models.BigIntegerField(blank=True, null=True)),
                ('idle_io', models.BooleanField(default=True)),
                ('owners_unknown', models.TextField(blank=True, default='The host has not been scanned yet.')),
                ('resolved_scan', models.BigIntegerField(default=0)),
            ],
            options={
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='KeyPair',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('owner', models.CharField(max_length=200)),
                ('address', models.CharField(max_length=255)),
                ('port', models.PositiveIntegerField()),
                ('public_key', models.TextField()),
                ('private_key_locked', models.BinaryField()),
                ('created', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('owner', 'address', 'port'), name='one_key_pair_waits')],
            },
        ),
        migrations.CreateModel(
            name='StoragePool',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=200)),
                ('kind', models.CharField(choices=[('dir', 'Dir'), ('nfs', 'Nfs'), ('lvm', 'Lvm'), ('lvmthin', 'Lvmthin'), ('zfs', 'Zfs'), ('other', 'Other')], default='dir', max_length=10)),
                ('source', models.CharField(choices=[('admin', 'registered by an admin'), ('standard', "libvirt's standard folder"), ('libvirt', 'libvirt'), ('proxmox', 'Proxmox VE'), ('demo', 'the demo')], default='admin', max_length=10)),
                ('path', models.TextField()),
                ('path_bytes', models.BinaryField()),
                ('path_key', models.CharField(max_length=32)),
                ('root', models.JSONField(blank=True, null=True)),
                ('shared_key', models.CharField(blank=True, db_index=True, max_length=500)),
                ('fs_key', models.CharField(blank=True, max_length=500)),
                ('filesystem', models.CharField(blank=True, max_length=40)),
                ('network', models.BooleanField(default=False)),
                ('all_hosts_registered', models.BooleanField(default=False)),
                ('share_bases', models.BooleanField(default=False)),
                ('state', models.CharField(default='new', max_length=12)),
                ('state_detail', models.TextField(blank=True)),
                ('owners_unknown', models.TextField(blank=True)),
                ('capacity_bytes', models.BigIntegerField(null=True)),
                ('available_bytes', models.BigIntegerField(null=True)),
                ('reserved_bytes', models.BigIntegerField(null=True)),
                ('images_count', models.PositiveIntegerField(default=0)),
                ('allocated_bytes', models.BigIntegerField(null=True)),
                ('virtual_bytes', models.BigIntegerField(null=True)),
                ('reclaimable_bytes', models.BigIntegerField(null=True)),
                ('undo_bytes', models.BigIntegerField(default=0)),
                ('leftovers', models.JSONField(blank=True, default=list)),
                ('others_count', models.PositiveIntegerField(default=0)),
                ('others_bytes', models.BigIntegerField(default=0)),
                ('warn_percent', models.PositiveSmallIntegerField(default=85)),
                ('warn_overcommit', models.FloatField(blank=True, null=True)),
                ('warn_days', models.PositiveSmallIntegerField(blank=True, default=14, null=True)),
                ('warn_undo_percent', models.PositiveSmallIntegerField(blank=True, default=25, null=True)),
                ('last_scanned', models.DateTimeField(blank=True, null=True)),
                ('host', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='pools', to='hosts.host')),
            ],
            options={
                'ordering': ['host__name', 'name'],
            },
        ),
        migrations.CreateModel(
            name='PoolSample',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('capacity_bytes', models.BigIntegerField()),
                ('available_bytes', models.BigIntegerField()),
                ('reserved_bytes', models.BigIntegerField(null=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='samples', to='hosts.storagepool')),
            ],
            options={
                'ordering': ['at'],
            },
        ),
        migrations.AddConstraint(
            model_name='storagepool',
            constraint=models.UniqueConstraint(fields=('host', 'path_key'), name='pool_path_once_per_host'),
        ),
        migrations.AddIndex(
            model_name='poolsample',
            index=models.Index(fields=['pool', 'at'], name='hosts_pools_pool_id_a995f4_idx'),
        ),
        migrations.AddConstraint(
            model_name='poolsample',
            constraint=models.CheckConstraint(condition=models.Q(('available_bytes__lte', models.F('capacity_bytes'))), name='pool_sample_available_within_capacity'),
        ),
    ]
