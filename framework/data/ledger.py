"""What became of every row: per source, rows read = kept + held out + dropped, each drop with its reason.

`prepare` fills it, `train` prints it and writes it into the run directory. Nothing leaves the data without a line here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SourceCounts:
    """The rows of one source (`data.train`, `data.train[0]`, `data.validation`)."""

    setting: str
    path: str
    files: int = 0
    read: int = 0
    kept: int = 0
    held_out: int = 0
    """Rows set aside for validation."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows per reason."""
    truncated: int = 0
    """Kept or held-out rows that were cut to `data.max_tokens`."""
    cut_tokens: int = 0
    """Tokens that those rows lost."""
    cut_trained_tokens: int = 0
    """Of them, tokens that would have been trained."""
    samples: int = 0
    """What training sees of `kept`; for text, chunks."""
    packs: int | None = None
    """How many packs hold these samples; None: not packed."""
    tokens: int = 0
    trained_tokens: int = 0
    weight: float | None = None
    passes: float = 1.0
    """Over `kept`, in one epoch: with weights, a source is repeated or taken in part (the rest in later epochs), and `samples`, `packs` and
    the tokens are those of an epoch, on average."""

    def check(self) -> None:
        """Raises RuntimeError where a row was lost on the way; each number was counted where it arose."""
        if self.read != self.kept + self.held_out + self.dropped.total():
            raise RuntimeError(f"rows of {self.setting} were lost or counted twice: {self}")


@dataclass
class Ledger:
    """All sources of a run."""

    sources: list[SourceCounts] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For `ledger.json`."""
        return {"sources": [asdict(source) | {"dropped": dict(source.dropped)} for source in self.sources]}

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Ledger:
        return cls([SourceCounts(**source | {"dropped": Counter(source["dropped"])}) for source in written["sources"]])

    def table(self) -> str:
        """For the console: a line per source, and one below it for each reason to drop or cut, and for packing."""
        lines = [f"{'source':<16} {'read':>9} {'kept':>9} {'held out':>9} {'dropped':>9} {'samples':>9} {'tokens':>12} {'trained':>12}"]
        for source in self.sources:
            counts = (source.read, source.kept, source.held_out, source.dropped.total(), source.samples)
            numbers = " ".join(f"{count:>9,}" for count in counts)
            lines.append(f"{source.setting:<16} {numbers} {source.tokens:>12,} {source.trained_tokens:>12,}  {source.path}")
            lines += [f"    dropped {count:,} rows: {reason}" for reason, count in source.dropped.most_common()]
            if source.truncated:
                cut = f"{source.cut_tokens:,} tokens cut, {source.cut_trained_tokens:,} of them trained"
                lines.append(f"    truncated {source.truncated:,} rows: {cut}")
            if source.weight is not None:
                tokens = sum(other.tokens for other in self.sources if other.weight is not None)
                share = f"{source.tokens / tokens:.2%} of the tokens of an epoch"
                lines.append(f"    weight {source.weight:g}: {share}, which passes over it {source.passes:.2f} times")
            if source.packs is not None:
                lines.append(f"    packed {source.samples:,} samples into {source.packs:,} packs, which is what a batch counts")
        return "\n".join(lines)
