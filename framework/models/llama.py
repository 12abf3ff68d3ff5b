"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM, by configuration.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward (arXiv:2302.13971). Modules and parameters
carry the names of Hugging Face, so weights need no name mapping; `architecture.py` has the rules of each family, `rope.py` positions,
`documents.py` attention within the documents of a pack. Norms, rotations, SwiGLU and the loss are `framework.kernels`.

Unusual, and relied on by the ZeRO engine: a block's parameters are read inside that block's forward only, the embedding, the final
norm and `lm_head` inside `Llama.forward` only, and nothing derived from a parameter is kept between calls.

Shapes: B batch, T positions of this call, S positions seen (T + cached), V vocabulary, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from framework.config.errors import UserError
from framework.config.schema import LlamaConfig
from framework.kernels.linear_cross_entropy import linear_cross_entropy
from framework.kernels.rms_norm import add_rms_norm, rms_norm
from framework.kernels.rope import rope
from framework.kernels.swiglu import swiglu
from framework.models import documents
from framework.models.activations import InputSaver, every_nth
from framework.models.architecture import check_architecture, head_dim, kv_heads
from framework.models.documents import Documents, Lengths, additive, document_attention
from framework.models.rope import rotary_tables

IGNORED_LABEL = -100


class Llama(nn.Module):
    """The whole network. Builds under `torch.device("meta")`, too: there are no buffers to load."""

    isolates_documents = True
    """The contract of `documents.py`: `forward` takes `document_lengths`, and documents of a pack do not see each other."""

    def __init__(
        self, config: LlamaConfig, *, activation_checkpointing: bool | Collection[int] = False, compile_blocks: bool = False
    ) -> None:
        """`activation_checkpointing`: recompute each block in backward, none, or those with these numbers."""
        super().__init__()
        if problems := check_architecture(config):
            raise UserError(*problems)
        self.config = config
        self.model = Decoder(config, activation_checkpointing, compile_blocks)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, std=config.initializer_range)
        self.tie_weights()
        if compile_blocks:
            for block in self.model.layers:
                block.forward = _compiled(block.forward)

    def tie_weights(self) -> None:
        """Make `lm_head` share the embedding where the configuration says so; to be repeated after `to_empty`, which parts them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
        position_ids: Tensor | None = None,
        document_lengths: Lengths | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int | None = None,
    ) -> Tensor:
        """Logits [B, T, V] without `labels`; with them the SUM of cross-entropy over the trained positions, 0-d, at least fp32.

        `labels` [B, T] are already shifted: `labels[b, t]` is the token that position t must predict, or -100. `trained_tokens` is how many
        of them are not -100; given, a GPU is not waited for. `position_ids` [T] or [B, T] default to 0, 1, ... after the cached ones.
        `logits_to_keep` limits logits to the last positions. Rows are padded on the right, where causal attention makes pads harmless.
        `document_lengths` of each row say that it is a pack: its documents do not see each other, and each has its own positions from 0.
        """
        if document_lengths is not None and (position_ids is not None or cache is not None):
            raise ValueError("document_lengths with position_ids or a cache: a pack has positions of its own and is not decoded")
        hidden = self.model(input_ids, position_ids, cache, document_lengths)
        if labels is None:
            if logits_to_keep is not None:
                hidden = hidden[:, -logits_to_keep:]
            return self.lm_head(self.model.norm(hidden).to(self.lm_head.weight.dtype))
        trained = trained_positions(labels, trained_tokens)
        hidden = self.model.norm(hidden.flatten(0, 1)[trained])  # [trained tokens, hidden_size]
        return linear_cross_entropy(hidden.to(self.lm_head.weight.dtype), self.lm_head.weight, labels.flatten()[trained])


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's forward compiled: not the block, whose hooks stay outside of the graph. Decoding, a new shape per token, stays eager."""
    compiled = torch.compile(forward)

    def choose(x: Tensor, cos: Tensor, sin: Tensor, mask: Documents | Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        return compiled(x, cos, sin, mask) if cache is None else forward(x, cos, sin, mask, cache)

    return choose


def trained_positions(labels: Tensor, trained_tokens: int | None) -> Tensor:
    """Indices into the flattened `labels` of all that are not -100. Waits for a GPU only when their number is not given."""
    trained = labels.flatten() != IGNORED_LABEL
    if trained_tokens is None:
        return trained.nonzero().squeeze(1)
    if labels.device.type == "cpu" and trained_tokens != (counted := int(trained.sum())):
        raise ValueError(f"trained_tokens={trained_tokens}, but labels hold {counted} tokens that are not {IGNORED_LABEL}")
    return torch.nonzero_static(trained, size=trained_tokens).squeeze(1)


class Decoder(nn.Module):
    """Embedding and blocks. The final norm lives here by name (`model.norm`) and is applied by `Llama`, to the positions it needs."""

    def __init__(self, config: LlamaConfig, activation_checkpointing: bool | Collection[int], compile_blocks: bool) -> None:
        super().__init__()
        self.config = config
        if isinstance(activation_checkpointing, bool):
            activation_checkpointing = every_nth(config.num_hidden_layers, activation_checkpointing)
        self.recomputed, self.compile_blocks = frozenset(activation_checkpointing), compile_blocks
        self.input_saver: InputSaver | None = None
        """How inputs of recomputed blocks are kept; None: as they are."""
        self.draws_random_numbers = False
        """Whether blocks have dropout, which recomputation must repeat."""
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, std=config.initializer_range)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None, cache: KVCache | None, document_lengths: Lengths | None = None
    ) -> Tensor:
        """Hidden states [B, T, hidden_size] before the final norm."""
        x = self.embed_tokens(input_ids)
        if document_lengths is None:
            cos, sin, mask = self.one_document(x, position_ids, cache.length if cache else 0)
        else:
            cos, sin, mask = self._several_documents(x, documents.filled(document_lengths, *input_ids.shape))
        for index, block in enumerate(self.layers):
            if index in self.recomputed and torch.is_grad_enabled():
                x = self._recomputed(block, x, cos, sin, mask)
            else:
                x = block(x, cos, sin, mask, cache)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return x

    def _recomputed(self, block: Block, x: Tensor, *tables: Documents | Tensor | None) -> Tensor:
        """The block's output; of what it saves only `x` is kept, since all blocks share the tables."""
        saver = self.input_saver
        with nullcontext() if saver is None else torch.autograd.graph.saved_tensors_hooks(saver.pack, saver.unpack):
            return checkpoint(lambda x: block(x, *tables), x, use_reentrant=False, preserve_rng_state=self.draws_random_numbers)

    def one_document(self, x: Tensor, position_ids: Tensor | None, cached: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary tables and attention mask of rows that are one document each, behind `cached` positions."""
        new = x.shape[1]
        length = cached + new
        if position_ids is None:
            position_ids = torch.arange(cached, length, device=x.device)
        elif self._is_dynamic:
            length = int(position_ids.max()) + 1
        cos, sin = rotary_tables(self.config, position_ids, length)
        mask = attention_mask(cached, new, self.config.sliding_window, x.device)
        return cos, sin, None if mask is None else additive(mask, x.dtype)

    def _several_documents(self, x: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor, Documents | Tensor]:
        """The same for packs; `lengths` fill each row."""
        length = documents.spread(lengths, x.device) if self._is_dynamic else x.shape[1]
        cos, sin = rotary_tables(self.config, documents.positions(lengths, x.device), length)
        way = documents.attention_way(x.device.type, x.dtype, head_dim(self.config), compiled=self.compile_blocks)
        return cos, sin, documents.separate(lengths, way, self.config.sliding_window, x.dtype, x.device)

    @property
    def _is_dynamic(self) -> bool:
        return self.config.rope_scaling is not None and self.config.rope_scaling.kind == "dynamic"


def attention_mask(cached: int, new: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `cached + new` keys each of `new` queries sees, bool [new, cached + new]; None where plain causality says it all."""
    total = cached + new
    slides = window is not None and total > window
    if not slides and (cached == 0 or new == 1):
        return None
    queries = torch.arange(cached, total, device=device)[:, None]
    keys = torch.arange(total, device=device)
    mask = keys <= queries
    return mask & (keys > queries - window) if slides else mask


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The unit that is sharded, checkpointed and compiled."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Documents | Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        normed, x = self.post_attention_layernorm(attended, x)
        return x + self.mlp(normed)


class Attention(nn.Module):
    """Grouped-query attention; biases, norms on heads and the sliding window by configuration."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = head_dim(config)
        self.queries_per_key = config.num_attention_heads // kv_heads(config)
        hidden, std = config.hidden_size, config.initializer_range
        queries, keys = config.num_attention_heads * self.head_dim, kv_heads(config) * self.head_dim
        self.q_proj = Linear(hidden, queries, bias=config.attention_bias, std=std)
        self.k_proj = Linear(hidden, keys, bias=config.attention_bias, std=std)
        self.v_proj = Linear(hidden, keys, bias=config.attention_bias, std=std)
        self.o_proj = Linear(queries, hidden, bias=config.attention_output_bias, std=std)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Documents | Tensor | None, cache: KVCache | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rope(self.q_norm(self.q_proj(x).view(heads)), cos, sin)  # [B, T, H, D]
        k = rope(self.k_norm(self.k_proj(x).view(heads)), cos, sin)  # [B, T, K, D]
        v = self.v_proj(x).view(heads)  # [B, T, K, D]
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms have given fp32
        if isinstance(mask, Documents):
            return self.o_proj(document_attention(q, k, v, mask))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [B, H or K, T, D]
        if cache is not None:
            k, v = cache.append(self.index, k, v)  # [B, K, S, D]
        # On CUDA only the fused kernels for half precision without a mask take fewer key heads; the others would build all scores.
        grouped = self.queries_per_key > 1
        if grouped and q.device.type == "cuda" and (mask is not None or q.dtype == torch.float32):
            k, v, grouped = k.repeat_interleave(self.queries_per_key, 1), v.repeat_interleave(self.queries_per_key, 1), False
        one_after_cached = cache is not None and cache.length > 0 and mask is None  # a single query, which sees every key
        causal = mask is None and not one_after_cached
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)  # [B, H, T, D]
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias, std = config.hidden_size, config.intermediate_size, config.mlp_bias, config.initializer_range
        self.gate_proj = Linear(hidden, inner, bias=bias, std=std)
        self.up_proj = Linear(hidden, inner, bias=bias, std=std)
        self.down_proj = Linear(inner, hidden, bias=bias, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), statistics in at least fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with `residual` that of the sum, and the sum."""
        x = x.to(self.weight.dtype)  # under autocast, `x` comes from a matrix product in 16 bits
        return rms_norm(x, self.weight, self.eps) if residual is None else add_rms_norm(x, residual, self.weight, self.eps)


class Linear(nn.Linear):
    """`nn.Linear` that starts from N(0, std) weights and zero biases."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float) -> None:
        self.std = std  # before the base class, which initialises
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` that starts from N(0, std)."""

    def __init__(self, rows: int, width: int, *, std: float) -> None:
        self.std = std  # before the base class, which initialises
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class KVCache:
    """Keys and values of the positions seen so far, for decoding: two tensors [B, K, max_length, D] per block, made at first use."""

    def __init__(self, config: LlamaConfig, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._blocks: list[tuple[Tensor, Tensor] | None] = [None] * config.num_hidden_layers

    def append(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store `k` and `v` [B, K, T, D] of block number `block` behind its cached ones; all of them, [B, K, S, D], come back."""
        end = self.length + k.shape[2]
        assert end <= self.max_length, f"{end} positions in a cache for {self.max_length}"
        if self._blocks[block] is None:
            shape = (*k.shape[:2], self.max_length, k.shape[3])
            self._blocks[block] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self._blocks[block]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]
