"""The lowest layer: all else may import it, and it imports nothing of the project."""
