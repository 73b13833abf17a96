"""Images that nobody needs: why that is believed, where it cannot be known, and what is done with them."""
