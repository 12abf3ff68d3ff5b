"""The commands, one file each. Importing this package imports nothing heavy."""
