"""Argument types of the compiled functions, for ctypes. tests/kernels/test_library.py compares this table with the header.

One letter per argument: p pointer (an address, None, a ctypes array or `byref`), i int, q int64, f float, d double, s bytes.
All return int, except `fw_describe` and `fw_sources`, which return text.
"""

from __future__ import annotations

import ctypes

TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}

SIGNATURES = {
    "fw_abi_version": "",
    "fw_describe": "",
    "fw_sources": "",
    "fw_choose_isa": "s",
    "fw_set_threads": "i",
    "fw_adamw": "pppppi" + "ppq" + "ddd" + "pp",
    "fw_lion": "ppppi" + "ppq" + "dd" + "pp",
    "fw_sgd": "ppppi" + "ppq" + "ddii" + "pp",
    "fw_square_sum": "piqppqp",
    "fw_cast": "pipiqp",
    "fw_quantize": "piqiipppp",
    "fw_dequantize": "pipqipiip",
    "fw_dequantize_sum_quantize": "ppqqiipppip",
    "fw_nf4_dequantize": "ppqipip",
    "fw_move_like_adamw": "ppppipqp",
    "fw_rms_norm_forward": "ppppppqqfip",
    "fw_rms_norm_backward": "ppppppppqqqip",
    "fw_rope": "ppppqqqqqiip",
    "fw_swiglu_forward": "pppqip",
    "fw_swiglu_backward": "pppppqip",
    "fw_cross_entropy": "pppqqqfiip",
    "fw_embedding_backward": "pppppqqqqip",
    "fw_top_k": "ppqqqip",
    "fw_sparse_attention_forward": "ppppppp" + "qqqqqq" + "fiip",
    "fw_sparse_attention_backward": "pppppppp" + "pppppp" + "qqqqqq" + "fiip",
}


class Range(ctypes.Structure):
    """`fw_range`: elements [start, stop) of a shard, and their settings."""

    _fields_ = [
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("lr", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("bias_correction1", ctypes.c_float),
        ("bias_correction2_sqrt", ctypes.c_float),
    ]


class Copies(ctypes.Structure):
    """`fw_copies`: what an optimizer writes besides the master."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("quantized", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bits", ctypes.c_int),
        ("block", ctypes.c_int),
    ]
