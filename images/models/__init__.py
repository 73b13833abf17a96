"""What this app keeps: the inventory, and the policies that work on it."""

from images.models.inventory import Claim, Image, ImageSample, ImageUse, ListedImages
from images.models.policies import Policy, PolicyPick, PolicyRun

__all__ = ["Claim", "Image", "ImageSample", "ImageUse", "ListedImages", "Policy", "PolicyPick", "PolicyRun"]
