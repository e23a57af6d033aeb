"""What a model with a position scheme is: its config, its parts, and one file for each family. Saved with a checkpoint."""
