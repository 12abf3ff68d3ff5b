"""Packs of documents that must not see each other: positions that restart in each, and attention within each.

    tokens      a a a b b c .        one row; padding is one more document, whose results nobody reads
    lengths     3 2 1
    positions   0 1 2 0 1 0 0
    the second b sees  . . . x x . .

A model that takes packs has `isolates_documents = True` and a forward that accepts `document_lengths`, the lengths of each row's
documents from its start; `require_isolation` refuses any other. `document_attention` computes attention in one of two ways, and a mask
for torch's own is the third; `attention_way` says which is used where:

- varlen: torch's variable-length FlashAttention; half precision on CUDA.
- apart: one document after the other; on the CPU, where it costs less than the scores that a mask throws away.
- mask: all scores of a row, those of other documents masked. Works everywhere, and is the reference of the other two.

Unusual: lengths are numbers on the host and no tensor, so that nothing waits for a GPU to learn them. What blocks need of them is made
once a forward, for all blocks.

Shapes: B batch, T positions, H query heads, K key/value heads, D head_dim, N documents of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework import torch_private
from framework.config.errors import Problem, UserError

Lengths = Sequence[Sequence[int]]
Way = Literal["varlen", "apart", "mask"]

AMPERE = (8, 0)  # the first GPUs with FlashAttention
LARGEST_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8  # of FlashAttention


def require_isolation(model: nn.Module) -> None:
    """Raises UserError for a model that would let the documents of a pack see each other."""
    if getattr(model, "isolates_documents", False) is not True:
        raise UserError(
            Problem(
                path="data.packing",
                got=f"packs for {type(model).__name__}, which does not keep the documents of a pack apart",
                expected="a model with `isolates_documents = True`, whose forward takes `document_lengths` (framework/models/documents.py)",
                fix="data.packing=false",
            )
        )


def attention_way(device_type: str, dtype: torch.dtype, head_dim: int, *, compiled: bool) -> Way:
    """How attention over packs is computed for blocks in `dtype` on `device_type`, compiled by torch.compile or not."""
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        fits = head_dim <= LARGEST_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0
        flash = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= AMPERE
        return "varlen" if fits and flash else "mask"
    return "apart" if device_type == "cpu" and not compiled else "mask"  # a graph would be made anew for each number of documents


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one forward, all rows one after the other, for `document_attention`."""

    lengths: tuple[int, ...]
    longest: int
    window: int | None
    """A token sees itself and the window - 1 tokens before it; None: all before it."""
    offsets: Tensor | None
    """varlen: int32 [N + 1], where each document starts, and the end. None: one document after the other."""
    mask: Tensor | None
    """apart, with a document longer than the window: the additive mask of the longest one, [longest, longest]."""


def filled(document_lengths: Lengths, rows: int, tokens: int) -> list[list[int]]:
    """`document_lengths` with the padding of each row as one more document. Raises ValueError where they cannot be those of the rows."""
    if len(document_lengths) != rows:
        raise ValueError(f"document_lengths of {len(document_lengths)} rows for {rows} rows of tokens")
    whole = []
    for row, lengths in enumerate(document_lengths):
        rest = tokens - sum(lengths)
        if rest < 0 or min(lengths, default=1) < 1:
            raise ValueError(f"document_lengths of row {row}: got {list(lengths)}, expected numbers above 0 with a sum of at most {tokens}")
        whole.append([*lengths, rest] if rest else list(lengths))
    return whole


def positions(lengths: Lengths, device: torch.device) -> Tensor:
    """[B, T] int64, from 0 in each document; `lengths` fill each row."""
    sizes = _sizes(lengths)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return _on(device, (torch.arange(len(starts), device="cpu") - starts).view(len(lengths), -1))


def spread(lengths: Lengths, device: torch.device) -> Tensor:
    """[B, T] int64: the length of the document that each token is in."""
    sizes = _sizes(lengths)
    return _on(device, sizes.repeat_interleave(sizes).view(len(lengths), -1))


def separate(lengths: Lengths, way: Way, window: int | None, dtype: torch.dtype, device: torch.device) -> Documents | Tensor:
    """What blocks need to attend within documents by `way`: `Documents`, or an additive mask [B, 1, T, T] for torch's attention."""
    if way == "mask":
        return additive(document_mask(lengths, window, device), dtype)
    flat = tuple(length for row in lengths for length in row)
    longest = max(flat)
    if way == "varlen":
        offsets = F.pad(_sizes(lengths).cumsum(0), (1, 0)).int()
        return Documents((), longest, window, _on(device, offsets), None)
    slides = window is not None and longest > window
    mask = additive(document_mask([[longest]], window, device)[0, 0], dtype) if slides else None
    return Documents(flat, longest, window, None, mask)


def document_mask(lengths: Lengths, window: int | None, device: torch.device) -> Tensor:
    """[B, 1, T, T] bool: whether a query (third dimension) sees a key (fourth)."""
    first = torch.arange(sum(lengths[0]), device=device) - positions(lengths, device)  # [B, T]: where the document of a token starts
    queries, keys = torch.arange(first.shape[1], device=device)[:, None], torch.arange(first.shape[1], device=device)
    seen = (keys <= queries) & (keys >= first[:, None, :, None])
    return seen if window is None else seen & (keys > queries - window)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`, else -inf. Torch makes this of a mask of bools in every block, and keeps each for backward."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention of `q` [B, T, H, D] to `k` and `v` [B, T, K, D] within documents: [B, T, H D]."""
    rows, tokens = q.shape[:2]
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))  # [B T, heads, D]
    attend = _one_by_one if documents.offsets is None else _varlen
    return attend(q, k, v, documents).reshape(rows, tokens, -1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    parts = zip(documents.lengths, *(tensor.split(documents.lengths) for tensor in (q, k, v)), strict=True)
    return torch.cat([_one(*part, documents) for part in parts])


def _one(length: int, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, length, D]
    mask = documents.mask[:length, :length] if documents.mask is not None and length > documents.window else None
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return y[0].transpose(0, 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    return torch_private.varlen_attention(q, k, v, documents.offsets, documents.longest, documents.window)


def _sizes(lengths: Lengths) -> Tensor:
    """[N] int64, on the CPU."""
    return torch.tensor([length for row in lengths for length in row], device="cpu")


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """`tensor` on `device`; from pinned memory, for which the host need not wait until the GPU is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
