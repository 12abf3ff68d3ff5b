"""The example of framework/train/README.md runs as it stands, and starts its second rank itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)  # two processes import Lightning, one after the other
def test_the_readmes_example_trains_on_two_ranks(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "framework/train/README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")}
    environment = {**outside, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"rank (\d) of 2: loss ([\d.]+)", result.stdout)
    assert sorted(rank for rank, _ in losses) == ["0", "1"]
    assert all(float(loss) < 0.5 for _, loss in losses)  # 8.0 untrained
