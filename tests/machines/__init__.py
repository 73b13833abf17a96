"""Real machines, for what one machine or a container cannot show: ``make machines`` builds them."""
