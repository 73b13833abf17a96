"""Two real machines with a network between them, for what one machine cannot show: ``make machines`` builds them."""
