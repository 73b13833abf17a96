#!/usr/bin/env python
"""Storage Admin's command line; ``manage.py up`` starts everything."""

from storage_admin.command import main

if __name__ == "__main__":
    main()
