"""Reading the images of a pool, and who names them."""
