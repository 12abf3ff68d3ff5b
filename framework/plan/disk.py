"""What a run asks of the disk of `offload.nvme_path`: room, which must be there before anything slow, and traffic, a line of the plan."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.plan.plan import Plan
from framework.ranks import launched, local_ranks
from framework.zero.nvme import SETTING, takes_direct_io


def require_room(plan: Plan) -> None:
    """Raises UserError where the disk of this machine has no room for what its ranks offload."""
    needed = plan.state_bytes(plan.recipe.zero.stage).disk
    if not needed:
        return
    place, folder = launched(os.environ), Path(plan.recipe.offload.nvme_path).expanduser()
    ranks = local_ranks(plan.recipe.trainer) if place is None else place.local_world_size
    if needed * ranks > (free := shutil.disk_usage(folder).free):
        got = f"{folder}, where {free / 2**30:,.1f} GiB are free"
        expected = f"{needed * ranks / 2**30:,.1f} GiB for the {ranks} {'rank' if ranks == 1 else 'ranks'} of this machine"
        raise UserError(Problem(path=SETTING, got=got, expected=expected, fix=f"{SETTING}=FOLDER, or a smaller offload.fraction"))


def describe_disk(plan: Plan) -> str:
    """What of a rank lies on the disk, and what goes to and fro."""
    offload, (read, written) = plan.recipe.offload, plan.disk_traffic
    names = {"optimizer state": offload.optimizer, "parameters": offload.params}
    what = " and ".join(name for name, place in names.items() if place == "nvme")
    nbytes = plan.state_bytes(plan.recipe.zero.stage).disk
    way = "" if takes_direct_io(offload.nvme_path) else ", through the system's cache (no O_DIRECT there)"
    return (
        f"{what} in {offload.nvme_path}, {nbytes / 2**20:,.1f} MiB per rank; "
        f"a step reads {read / 2**20:,.1f} and writes {written / 2**20:,.1f} MiB per rank{way}"
    )
