"""The order of samples: a pure function of (seed, purpose, epoch, samples), the same on every rank, machine and version.

Shuffling sorts by raw 64-bit words of a PCG64 stream. numpy promises that those never change (NEP 19), which it does not promise for
its `permutation`; an order that changed with an upgrade would break resuming inside an epoch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

PURPOSES = {"epoch": 0, "held out": 1}


def permutation(seed: int, purpose: Literal["epoch", "held out"], epoch: int, samples: int, *, stream: int = 0) -> np.ndarray:
    """[samples] int64, each of 0 ... samples - 1 once. `stream` tells apart several of one purpose, such as those of sources."""
    entropy = [seed % 2**64, PURPOSES[purpose], epoch, *([stream] if stream else [])]
    return np.argsort(np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(samples), kind="stable")
