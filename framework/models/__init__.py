"""Decoder-only models of the Llama family: the network, reading and writing of pretrained weights, tokenizers, generation.

`locate` and `architecture` import no torch. Importing the package itself imports nothing.
"""
