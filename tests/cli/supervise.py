"""The supervisor as a command for its tests: `python supervise.py RANKS RUN_DIR BEHAVIOUR [GRACE_SECONDS]` with tiny ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from framework.cli.launch import launch

if __name__ == "__main__":
    ranks, run_dir, behaviour = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    grace = float(sys.argv[4]) if len(sys.argv) > 4 else 10.0
    outcome = launch(
        [sys.executable, str(Path(__file__).with_name("tiny_rank.py")), behaviour, "no config", str(run_dir)],
        ranks=ranks,
        run_dir=run_dir,
        stop_grace_seconds=grace,
        kill_grace_seconds=grace,
    )
    assert "torch" not in sys.modules
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    sys.exit(outcome.status)
