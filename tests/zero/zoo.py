"""Small models, each with one thing that sharding engines get wrong, the loop that trains them on an engine, and the plain one that says
what is right.

Every model maps token ids [B, T] to a summed squared error; `tokens` are counted by the caller. Sizes are odd on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.zero import ZeroEngine

VOCABULARY, WIDTH, BLOCKS = 31, 12, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 29)
        self.down = nn.Linear(29, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Plain(nn.Module):
    """Embedding, blocks, head: untied."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(self.body(self.embed(ids[:, :-1]))).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class TiedAcrossBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Frozen(Plain):
    """The embedding and a block are frozen: the first blocks get inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class LowRankBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down_a, self.down_b = nn.Parameter(torch.randn(29, 2) / 5), nn.Parameter(torch.randn(2, WIDTH) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden) + hidden @ self.down_a @ self.down_b


class LowRank(Plain):
    """Adapters are trained over a frozen base; the base is needed for the gradient of each block's input."""

    block = LowRankBlock

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class FromCodes(torch.autograd.Function):
    """x W, W made of frozen integers for forward and again for backward, so that they must be there both times."""

    @staticmethod
    def weight(codes: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return ((codes.to(like.dtype) - 128) * scales.view(torch.float32).to(like.dtype)[:, None]).to(like.dtype)

    @staticmethod
    def forward(ctx, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        return x @ FromCodes.weight(codes, scales, x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad @ FromCodes.weight(*ctx.saved_tensors, grad).T, None, None


class IntegersBlock(LowRankBlock):
    """Integers of two data types between floating-point parameters, trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(256, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter((torch.rand(WIDTH) / 500).view(torch.uint8), requires_grad=False)
        self.shifts = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(FromCodes.apply(x, self.codes, self.scales)) + self.shifts.to(x.dtype) / 20


class Integers(LowRank):
    block = IntegersBlock


class CheckpointedIntegers(Integers):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 5)
        self.blocks[1].never = nn.Linear(7, 2)


class Repeated(Plain):
    """Every block runs twice."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(super().body(x))


class SkippedBlock(Plain):
    """A unit whose parameters get no gradient in this forward."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            x = x + self.blocks[1](x)
        return self.blocks[2](x)


class Checkpointed(Plain):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class CheckpointedTogether(Plain):
    """One checkpoint around several units."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().body, x, use_reentrant=False)


class InsideCheckpointBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(self.norm(y)))), x, use_reentrant=False)


class CheckpointedInside(Plain):
    block = InsideCheckpointBlock


class BranchingBlock(Block):
    """Which of two experts runs depends on the data, so ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_a, self.expert_b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.expert_a if float(x.detach().sum()) > 0 else self.expert_b
        return super().forward(x) + expert(x)


class Branching(Plain):
    block = BranchingBlock


class BranchingRoot(Plain):
    """A part of the root that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.side(x) if int(x.shape[0]) % 2 else x)


class KeywordBlock(Block):
    """Keyword-only input, a dict output whose tensor is a view, changed in place by the caller."""

    def forward(self, *, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(hidden)
        return {"hidden": out.reshape(out.shape[0], -1).view(out.shape), "note": None}


class KeywordDictInPlace(Plain):
    block = KeywordBlock

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = block(hidden=x)["hidden"]
        out += 0.5
        return out


class InPlaceInputBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return super().forward(x)


class InPlaceInput(Plain):
    block = InPlaceInputBlock

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x * 1.0)


class Scalars(Plain):
    """0-D and single-element parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x * self.gain + self.shift)


class Compiled(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)


MODELS = {
    cls.__name__: cls
    for cls in (
        Plain,
        Tied,
        TiedAcrossBlocks,
        Frozen,
        LowRank,
        Integers,
        CheckpointedIntegers,
        Unused,
        Repeated,
        SkippedBlock,
        Checkpointed,
        CheckpointedTogether,
        CheckpointedInside,
        Branching,
        BranchingRoot,
        KeywordDictInPlace,
        InPlaceInput,
        Scalars,
        Compiled,
    )
}


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def micro_batches(steps: int, per_step: int, seed: int = 2) -> list[list[torch.Tensor]]:
    """`steps` lists of `per_step` micro-batches [B, T] of token ids, all of different shapes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 5, (steps, per_step, 2), generator=generator)
    return [[torch.randint(0, VOCABULARY, (int(b), 3 + int(t)), generator=generator) for b, t in row] for row in sizes]


def count_tokens(ids: torch.Tensor) -> int:
    return ids[:, 1:].numel()


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": lr / 2}], lr=lr, weight_decay=0.1)


def promised(index: int, micro_batches: int) -> bool:
    """What is so of the last of a step's micro-batches."""
    return index == micro_batches - 1


def train(engine: ZeroEngine, steps: list[list[torch.Tensor]], is_last: Callable[[int, int], bool] = promised) -> dict:
    """Global batches, dealt out to the ranks. `is_last`: what is said of micro-batch `index` of so many."""
    losses, norms = [], []
    for micros in steps:
        mine = micros[engine.world.rank :: engine.world.size]
        for index, ids in enumerate(mine):
            engine.backward(engine.module(ids.to(engine.device)), count_tokens(ids), last=is_last(index, len(mine)))
        stats = engine.step()
        losses.append(float(stats.loss))
        norms.append(float(stats.grad_norm))
    return {"loss": losses, "norm": norms}


def train_plain(name: str, steps: list[list[torch.Tensor]], clip: float | None, dtype: torch.dtype = torch.float64) -> dict:
    """The reference: one process, plain torch, the whole global batch."""
    model = make(name, dtype)
    optimizer = adamw(model)
    losses, norms = [], []
    for micros in steps:
        tokens = sum(count_tokens(ids) for ids in micros)
        loss = sum(model(ids) for ids in micros) / tokens
        optimizer.zero_grad()
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, clip if clip is not None else float("inf"))
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return {"loss": losses, "norm": norms, "model": {n: p.detach().clone() for n, p in model.named_parameters()}}
