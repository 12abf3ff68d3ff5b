"""Training runs: Lightning strategy and module, run directory, metrics and callbacks. Importing this package imports nothing heavy."""
