"""Images, guests and figures to look at without a host of one's own."""
