from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('hosts', '0003_lvm'),
    ]

    operations = [
        migrations.RenameField(model_name='storagepool', old_name='lvm', new_name='volume_facts'),
        migrations.AlterField(
            model_name='storagepool',
            name='kind',
            field=models.CharField(choices=[('dir', 'Dir'), ('nfs', 'Nfs'), ('lvm', 'Lvm'), ('lvmthin', 'Lvmthin'), ('zfs', 'Zfs'), ('rbd', 'Rbd'), ('other', 'Other')], default='dir', max_length=10),
        ),
        migrations.AlterField(
            model_name='storagepool',
            name='source',
            field=models.CharField(choices=[('admin', 'registered by an admin'), ('standard', "libvirt's standard folder"), ('libvirt', 'libvirt'), ('proxmox', 'Proxmox VE'), ('lvm', 'LVM'), ('zfs', 'ZFS'), ('rbd', 'Ceph RBD'), ('demo', 'the demo')], default='admin', max_length=10),
        ),
    ]
