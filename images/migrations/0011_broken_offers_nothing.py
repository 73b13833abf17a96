"""What a job cannot rewrite offers nothing: the next scan of its host works its sums out anew."""

from django.db import migrations


def withdraw(apps, schema_editor):
    images, hosts = apps.get_model("images", "Image")._base_manager, apps.get_model("hosts", "Host").objects
    offered = images.filter(reclaimable_bytes__isnull=False).exclude(state="ok")
    for host in hosts.filter(pk__in=offered.values("host")):
        offered.filter(host=host).update(
            reclaimable_bytes=None, reclaimable_low=None, reclaimable_high=None, reclaimable_method="",
            changed_scan=host.resolved_scan + 1,
        )


class Migration(migrations.Migration):
    dependencies = [("images", "0010_preallocated"), ("hosts", "0010_leftovers")]
    operations = [migrations.RunPython(withdraw, migrations.RunPython.noop)]
