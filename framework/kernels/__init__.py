"""The Python face of `csrc/`: one file per operation, with a plain-torch reference of the same signature beside the compiled one.

Nothing is loaded or compiled when this is imported; `library.py` finds the compiled libraries at the first call and says which are there.
"""
