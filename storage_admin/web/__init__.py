"""The pages: URLs, views, lists, forms and template tags. Nothing imports it."""
