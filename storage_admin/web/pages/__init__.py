"""The pages. Function views: they read through selectors and write through services."""
