"""Makes a new directory for every job: RUNS_DIR/NAME/TIME, and for the jobs of a sweep RUNS_DIR/NAME/TIME/NUMBER.

A directory is claimed by making it, so two commands that start within one second get two (TIME and TIME-2).
"""

from __future__ import annotations

import contextlib
import itertools
from datetime import datetime
from pathlib import Path

from framework.config.errors import Problem, UserError


class RunFolders:
    """Hands out the directories of one command, whose jobs share one TIME."""

    def __init__(self) -> None:
        self._time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self._sweeps: dict[Path, Path] = {}

    def claim(self, runs_dir: str, name: str, number: int | None) -> Path:
        """A new, empty directory, absolute. `number`: of the job in its sweep. Raises UserError where none can be made."""
        wanted = Path(runs_dir).expanduser().absolute() / name / self._time
        try:
            if number is None:
                return _new_folder(wanted)
            if wanted not in self._sweeps:
                self._sweeps[wanted] = _new_folder(wanted)
            folder = self._sweeps[wanted] / str(number)
            folder.mkdir()
        except OSError as error:
            expected = "a place where folders can be made"
            raise UserError(Problem(path="runs_dir", got=f"{runs_dir} ({error})", expected=expected, fix="runs_dir=FOLDER")) from error
        return folder


def _new_folder(wanted: Path) -> Path:
    """`wanted`, or `wanted`-2, -3 ... where that is taken."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable: the count has no end")
