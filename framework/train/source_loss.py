"""What a validation measures: for each source of validation data the exact loss, and its exponential.

A loss is the sum over all trained tokens, of all ranks, divided by their number, so it depends on neither batches nor ranks (P19).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from framework.config.errors import Problem, UserError

LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class SourceLoss:
    """Of one source, or of all together. Raises UserError without a trained token: such a source has no loss (P20)."""

    name: str
    loss_sum: float
    trained_tokens: int

    def __post_init__(self) -> None:
        if self.trained_tokens == 0:
            got = f"validation data without a single trained token ({self.name})"
            raise UserError(Problem(path="data.validation", got=got, expected="at least one answer"))

    @property
    def loss(self) -> float:
        return self.loss_sum / self.trained_tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def total(sources: Sequence[SourceLoss]) -> SourceLoss:
    """All sources as one: each token counts the same, whichever it is of."""
    tokens = sum(source.trained_tokens for source in sources)
    return SourceLoss(name="total", loss_sum=math.fsum(source.loss_sum for source in sources), trained_tokens=tokens)


def perplexity(loss: float) -> float:
    """e to the `loss`; infinite where that is beyond floating point."""
    return math.exp(loss) if loss < LARGEST_EXPONENT else math.inf
