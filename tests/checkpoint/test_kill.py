"""A kill -9 at any moment, of all ranks or of one, leaves the newest checkpoint whole and no rank waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_dozen_kills_at_random_moments_of_saves_in_the_background(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("kill_while_saving.py")), str(tmp_path), "24"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 10, "saves were finished between"
