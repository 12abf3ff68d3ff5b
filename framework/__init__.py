"""framework: recipes for training large language models. Importing this package imports nothing heavy (no torch)."""

__version__ = "0.1.0"
