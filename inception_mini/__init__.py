"""Contains a scaled Inception v3, its data, and programs that train it."""
