from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('hosts', '0003_lvm'),
    ]

    operations = [
        migrations.RenameField(model_name='storagepool', old_name='lvm', new_name='volume_facts'),
        migrations.AlterField(
            model_name='storagepool',
            name='source',
            field=models.CharField(choices=[('admin', 'registered by an admin'), ('standard', "libvirt's standard folder"), ('libvirt', 'libvirt'), ('proxmox', 'Proxmox VE'), ('lvm', 'LVM'), ('zfs', 'ZFS'), ('demo', 'the demo')], default='admin', max_length=10),
        ),
    ]
