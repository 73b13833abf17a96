"""What the scheduler has done about accounts."""

from celery import shared_task
from django.utils import timezone

from storage_admin.accounts import refusals
from storage_admin.accounts.models import Session


@shared_task
def tidy() -> None:
    """Writes how often what was refused came again, and forgets sessions that are over."""
    now = timezone.now()
    refusals.settle(now)
    Session.objects.filter(expire_date__lt=now).delete()
