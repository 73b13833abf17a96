"""From what hosts tell to rows: one scan, one look at an image, and what is gone."""
