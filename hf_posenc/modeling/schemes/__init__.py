"""What schemes are made of, the table of them, and one file for each."""
