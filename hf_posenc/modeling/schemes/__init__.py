"""What schemes are made of, the table of them, and one file for each. Saved with a checkpoint, as far as it needs them."""
