"""Reads: what pages and endpoints show of images, chains, guests and pools."""

from images.selectors.chains import Chain, Edge, GuestRef, Node, chain_of
from images.selectors.guests import guests_for, why_no_image
from images.selectors.lists import (
    ORDERINGS,
    Matches,
    MatchingImages,
    at_least,
    at_most,
    history_of,
    images_for,
    of_host,
    ordered,
    with_text,
)
from images.selectors.overview import overview
from images.selectors.overview_shapes import Candidate, Concern, ConcernItem, Overview, PoolRow, Totals, Won
from images.selectors.pools import days_until_full, forecasts, pool_rows

__all__ = [
    "ORDERINGS",
    "Candidate",
    "Chain",
    "Concern",
    "ConcernItem",
    "Edge",
    "GuestRef",
    "Matches",
    "MatchingImages",
    "Node",
    "Overview",
    "PoolRow",
    "Totals",
    "Won",
    "at_least",
    "at_most",
    "chain_of",
    "days_until_full",
    "forecasts",
    "guests_for",
    "history_of",
    "images_for",
    "of_host",
    "ordered",
    "overview",
    "pool_rows",
    "why_no_image",
    "with_text",
]
