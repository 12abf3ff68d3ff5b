"""Angles of rotary position embedding (RoFormer, arXiv:2104.09864) with the scalings of the Llama family.

`rotary_tables` makes cos and sin for a forward pass; `framework.kernels.rope` applies them to queries and keys. They are made anew in
every forward (a few small kernels for the whole network, not per block): nothing is cached, so nothing has to be loaded, moved or freed.

Unusual: `dynamic` scaling depends on the length of the sequence at hand, so its tables differ between a short and a long batch. In a
pack each document has the tables of its own length, those that it would have alone.

Shapes: B batch, T positions, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from framework.config.schema import LlamaConfig, RopeScaling
from framework.models.architecture import head_dim


def rotary_tables(config: LlamaConfig, positions: Tensor, length: int | Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin in fp32 for `positions` ([T] or [B, T] int64), each [..., T, D/2].

    `length` is the longest position + 1, of all or, a tensor like `positions`, of the document of each; only `dynamic` looks at it.
    """
    inverse_frequencies, factor = inverse_frequencies_of(config, length, positions.device)
    angles = positions[..., None].float() * inverse_frequencies
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies_of(config: LlamaConfig, length: int | Tensor, device: torch.device | str) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] in fp32, for `dynamic` and a tensor `length` [..., D/2]; and the factor on cos and sin."""
    scaling, dim, theta = config.rope_scaling, head_dim(config), config.rope_theta
    if scaling is not None and scaling.kind == "dynamic":  # NTK-aware: a larger base instead of smaller positions
        trained_length = config.max_position_embeddings
        length = length.clamp(min=trained_length)[..., None] if isinstance(length, Tensor) else max(length, trained_length)
        stretch = scaling.factor * length / trained_length - (scaling.factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    trained_length = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling, trained_length), 1.0
    return _yarn(frequencies, scaling, trained_length, theta, dim)


def _llama3(frequencies: Tensor, scaling: RopeScaling, trained_length: int) -> Tensor:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, a linear blend in between."""
    rotations = trained_length * frequencies / (2 * math.pi)  # of each pair within the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((rotations - low) / (high - low)).clamp(0, 1)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, trained_length: int, theta: float, dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): pairs that turn often are kept, slow ones interpolated, a ramp over pair indices in between."""

    def pair_index(rotations: float) -> float:
        return dim * math.log(trained_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_index(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_index(scaling.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    kept_share = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor, factor
