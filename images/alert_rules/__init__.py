"""What is wrong, looked for from the database, as alerts."""
