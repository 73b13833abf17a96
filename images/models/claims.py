"""What a scan was told of things that are no rows here and may need an image."""

from django.db import models

from storage_admin.hosts.models import Host


class Claim(models.Model):
    """Something that needs an image of a host, or may need it, and is neither its guest nor an image of its pools."""

    class Kind(models.TextChoices):
        #: A guest of another node of the cluster has this number: what is named after it may be its disk.
        NUMBER = "number"
        #: The file of this device and inode is the base of a guest's disk that lies outside of every pool.
        FILE = "file"
        #: What such a disk stands on cannot be told: it may be any image of the host.
        ANY = "any"

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="claims")
    kind = models.CharField(max_length=10, choices=Kind)
    #: A guest's number; device and inode with a colon between them.
    key = models.CharField(max_length=100, blank=True)
    #: Who it is, as a sentence.
    why = models.TextField()

    class Meta:
        ordering = ["host", "kind", "key"]
        constraints = [models.UniqueConstraint(fields=["host", "kind", "key"], name="claim_once_per_host")]

    def __str__(self) -> str:
        return self.why
