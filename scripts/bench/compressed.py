"""Loss curves with compressed communication against those without: fine-tuning of a real model, same seeds and samples.

    python scripts/bench/compressed.py data.train=rows.json          the table of README.md; overrides are those of `train`
    python scripts/bench/compressed.py --quick model=llama_tiny ...  whether it works: two settings, three steps

SmolLM2-135M, ZeRO stage 3 on 2 ranks (gloo). The ranks live through all runs and take the settings in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from measure import machine  # noqa: E402

from framework.config.compose import compose  # noqa: E402
from framework.config.schema import RecipeConfig, ZeroConfig  # noqa: E402

WORLD_SIZE, EVERY = 2, 5
RECIPE = (
    *("+recipe=llama_sft", "model=smollm2", f"trainer.devices={WORLD_SIZE}", "trainer.accelerator=cpu", "trainer.global_batch_size=4"),
    *("data.max_tokens=96", "data.on_too_long=drop", "schedule.warmup_ratio=0", "trainer.epochs=null", "trainer.log_every_n_steps=1"),
    *("checkpoint.at_end=false", "checkpoint.on_stop=false", "checkpoint.export=false", "checkpoint.every_n_steps=null"),
)
SETTINGS = {
    "none": {},
    "bf16 reduce": {"reduce_compression": "bf16"},
    "int8 reduce": {"reduce_compression": "int8"},
    "int8 reduce, feedback": {"reduce_compression": "int8", "error_feedback": True},
    "int8 gather": {"gather_compression": "int8"},
    "int8 both, feedback": {"gather_compression": "int8", "reduce_compression": "int8", "error_feedback": True},
}


def main() -> None:
    args = parse_args()
    recipe = compose([*RECIPE, f"trainer.max_steps={args.steps}", *args.overrides]).recipe
    settings = {name: SETTINGS[name] for name in ("none", *args.settings)}
    recipes = {name: dataclasses.replace(recipe, zero=ZeroConfig(stage=3, **setting)) for name, setting in settings.items()}
    here = machine()
    print(
        f"{date.today()}, {here['cpu']}, {here['cores']} cores, load before the start {here['load']:.1f}, torch {here['torch']}\n"
        f"{recipe.model.path or 'random weights'}, {args.steps} steps of {recipe.trainer.global_batch_size} samples, {WORLD_SIZE} ranks\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        runs = measure(recipes, Path(folder))
    print(table(runs))
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": here, "runs": runs}, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as for `train`")
    parser.add_argument("--steps", type=int, default=30)
    compressed = [name for name in SETTINGS if name != "none"]
    parser.add_argument("--settings", nargs="+", choices=compressed, default=compressed, metavar="NAME", help="besides none (default: all)")
    parser.add_argument("--quick", action="store_true", help="two settings, 3 steps: the numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was measured")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.settings = 3, compressed[-1:]
    return args


def measure(recipes: dict[str, RecipeConfig], folder: Path) -> dict[str, dict]:
    """By setting: losses of all steps, bytes that a rank sent. Ends the program where a rank fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["framework.cli.fit"])  # seconds, once
    ranks = [context.Process(target=train, args=(recipes, folder, rank)) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        logs = "\n".join((folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in failed)
        sys.exit(f"rank {failed[0]} failed\n{logs}")
    from framework.train.metrics import read_metrics, series
    from framework.train.run_dir import METRICS, read_summary

    runs = {}
    for name in recipes:
        steps, losses = series(read_metrics(folder / name / METRICS), "loss")
        runs[name] = {"losses": dict(zip(steps, losses, strict=True)), "sent_bytes": read_summary(folder / name)["bytes_sent"]}
    return runs


def train(recipes: dict[str, RecipeConfig], folder: Path, rank: int) -> None:
    """Be one rank, of all runs."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # nobody waits for a rank whose parent was killed
    import torch.distributed as dist

    from framework.cli.fit import run
    from framework.train.run_dir import write_run_dir

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    for name, recipe in recipes.items():
        if rank == 0:
            write_run_dir(folder / name, recipe, overrides=[], command=sys.argv)
        dist.barrier()
        run(recipe, folder / name)


def table(runs: dict[str, dict]) -> str:
    """Every fifth step a row, and what it comes to."""
    exact = runs["none"]["losses"]
    last = max(exact)
    rows = [["step", *runs], ["---:"] * (1 + len(runs))]
    for step in sorted({1, *range(EVERY, last + 1, EVERY), last}):
        rows.append([str(step), *(f"{run['losses'][step]:.4f}" for run in runs.values())])
    rows.append(["last, less that of none", *(f"{run['losses'][last] - exact[last]:+.4f}" for run in runs.values())])
    largest = [max(abs(run["losses"][step] - exact[step]) for step in exact) for run in runs.values()]
    rows.append(["largest difference", *(f"{value:.4f}" for value in largest)])
    rows.append(["MiB sent per step", *(f"{run['sent_bytes'] / last / 2**20:.1f}" for run in runs.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    main()
