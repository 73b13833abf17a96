"""One file takes another one's name: journal, gate, exchange, and what settles it after a kill."""
