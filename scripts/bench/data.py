"""From files to batches: speed against `datasets.map`, how full packs are, what a batch costs, and whether memory stays flat.

    python scripts/bench/data.py                      the tables of README.md, a few minutes
    python scripts/bench/data.py --rows 10_000_000    memory with so many rows
    python scripts/bench/data.py --quick              whether it works, in seconds

Seconds are those of a core in use: what else a shared machine does is not in them. Memory is looked at in a process of its own for each
number of rows: its own memory (what the system calls anonymous), a hundred times a second. Pages of mapped files that happen to be in
memory are the system's cache, and are given back when somebody needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread each
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import numpy as np  # noqa: E402

from framework.config.schema import DataConfig  # noqa: E402
from framework.data.batches import StepBatches  # noqa: E402
from framework.data.pack import best_fit  # noqa: E402
from framework.data.prepare import Prepared, prepare  # noqa: E402

PARAMETERS, FLOPS_PER_SECOND = 135e6, 4e14
"""Of the smallest model that the loader should not slow down, on one large GPU."""
LOOKS_PER_SECOND = 100
TOKENS_PER_ROW = 24
SMALLEST_VOCABULARY = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: int(text.replace("_", "")), default=400_000, help="most rows whose memory is looked at")
    parser.add_argument("--megabytes", type=float, default=8, help="of text to tokenise")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--memory-of", nargs=2, metavar=("FILE", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(memory_of(*arguments.memory_of)))
        return
    rows, megabytes = (16_000, 0.2) if arguments.quick else (arguments.rows, arguments.megabytes)
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokenizer = Path(scratch), small_tokenizer(megabytes / 8)
        measured = {
            "date": date.today().isoformat(),
            "preparing": preparing(folder, tokenizer, megabytes),
            "packing": packing(20_000 if arguments.quick else 100_000),
            "batches": batches(folder, tokenizer, samples=1000 if arguments.quick else 8000),
            "memory": memory(folder, [rows // 8, rows] if arguments.quick else [rows // 16, rows // 4, rows]),
        }
    print(report(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1))


def small_tokenizer(megabytes: float):
    """Byte-level BPE of at most 8,000 tokens, made of so much of Python's own sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    core.train_from_iterator(documents(megabytes), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def documents(megabytes: float) -> list[str]:
    """Real text that every machine has: the sources of Python's library, again and again where that is not enough."""
    found, characters = [], 0
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    while characters < megabytes * 1e6:
        for file in files:
            if characters >= megabytes * 1e6:
                break
            found.append(file.read_text(encoding="utf-8", errors="replace"))
            characters += len(found[-1])
    return found


def write_rows(path: Path, rows: Iterator[dict]) -> str:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def preparing(folder: Path, tokenizer, megabytes: float) -> dict[str, float]:
    """Tokens per second of one process, files to arrays on disk, and seconds of a later start."""
    import datasets

    path = write_rows(folder / "text.jsonl", ({"text": text} for text in documents(megabytes)))
    config = DataConfig(train=path, max_tokens=1024, cache_dir=str(folder / "cache"))

    def ours() -> Prepared:
        return prepare(config, tokenizer, seed=0, show_progress=False)

    began = time.process_time()
    prepared = ours()
    first = time.process_time() - began
    began = time.process_time()
    ours()
    again = time.process_time() - began

    def encode(batch: dict) -> dict:
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"], verbose=False)["input_ids"]]}

    datasets.disable_progress_bars()
    began = time.process_time()
    read = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(folder / "datasets"))
    mapped = read.map(encode, batched=True, batch_size=64, remove_columns=["text"])
    theirs = time.process_time() - began
    tokens = prepared.train.trained_tokens + 1
    assert tokens == sum(map(len, mapped["input_ids"])), "both have the same tokens"
    return {"tokens": tokens, "ours_per_s": tokens / first, "datasets_per_s": tokens / theirs, "later_start_s": again}


def packing(samples: int) -> list[dict[str, float]]:
    """Share of a pack that is filled, for lengths like those of conversations."""
    rows = []
    for max_tokens in (1024, 4096):
        lengths = np.random.default_rng(0).lognormal(5.0, 1.0, samples).astype(np.int64).clip(2, max_tokens)
        began = time.process_time()
        best_fit(lengths, max_tokens)
        seconds = time.process_time() - began
        some = lengths[:20_000]  # first fit looks at every pack for every sample
        packs = {"ours": best_fit(some, max_tokens)[1], "first_fit": first_fit(some, max_tokens), "unpacked": len(some)}
        rows.append(
            {
                "max_tokens": max_tokens,
                "samples": samples,
                **{name: some.sum() / (count * max_tokens) for name, count in packs.items()},
                "seconds": seconds,
            }
        )
    return rows


def first_fit(lengths: np.ndarray, max_tokens: int) -> int:
    """Packs where each sample goes into the first one that takes it, in the order of the file."""
    rooms = np.full(len(lengths), max_tokens)
    packs = 0
    for length in lengths:
        at = int(np.argmax(rooms[: packs + 1] >= length))
        rooms[at] -= length
        packs = max(packs, at + 1)
    return packs


def batches(folder: Path, tokenizer, samples: int) -> dict[str, float]:
    """Milliseconds of a step's batch, from the arrays on disk to tensors, beside the step of a small model on a large GPU."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.0, 1.0, samples).astype(np.int64).clip(2, 1024)
    path = write_rows(folder / "ids.jsonl", ({"input_ids": rng.integers(0, SMALLEST_VOCABULARY, length).tolist()} for length in lengths))
    config = DataConfig(train=path, max_tokens=1024, packing=True, cache_dir=str(folder / "cache"))
    data = prepare(config, tokenizer, seed=0, show_progress=False).train
    steps = StepBatches(data, micro_batch_size=16, accumulate=1)
    times, tokens = [], []
    iterator = iter(steps)
    while True:
        began = time.process_time()
        step = next(iterator, None)
        if step is None:
            break
        times.append(time.process_time() - began)
        tokens.append(sum(micro["input_ids"].numel() for micro in step))
    tokens_per_step = int(np.median(tokens))
    step_ms = 6 * PARAMETERS * tokens_per_step / FLOPS_PER_SECOND * 1e3
    batch_ms = float(np.median(times)) * 1e3
    return {"tokens_per_step": tokens_per_step, "batch_ms": batch_ms, "step_ms": step_ms, "share": batch_ms / step_ms}


def memory(folder: Path, sizes: list[int]) -> list[dict[str, float]]:
    rows = []
    for size in sizes:
        path = write_rows(folder / f"{size}.jsonl", short_rows(size))
        command = [sys.executable, __file__, "--memory-of", path, str(folder / f"cache-{size}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"rows": size, **json.loads(done.stdout.splitlines()[-1])})
        Path(path).unlink()
    return rows


def short_rows(count: int) -> Iterator[dict]:
    """Random tokens, a few thousand rows at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, count, 4096):
        for ids in rng.integers(0, SMALLEST_VOCABULARY, (min(4096, count - start), TOKENS_PER_ROW)).tolist():
            yield {"input_ids": ids}


def memory_of(path: str, cache: str) -> dict[str, float]:
    """Of preparing the rows of `path` and taking a hundred packed batches of them: the most memory above that before."""
    tokenizer = small_tokenizer(0.02)
    config = DataConfig(train=path, max_tokens=1024, validation_fraction=0.01, packing=True, cache_dir=cache)
    import torch  # noqa: F401  not a part of what is measured

    with peak_of_own_memory() as peak:
        began = time.process_time()
        data = prepare(config, tokenizer, seed=0, show_progress=False)
        preparing_s, preparing_bytes = time.process_time() - began, peak["bytes"]
        steps = iter(StepBatches(data.train, micro_batch_size=8, accumulate=1))
        for _, _ in zip(range(100), steps, strict=False):
            pass
    return {"peak_bytes": peak["bytes"], "preparing_bytes": preparing_bytes, "seconds": preparing_s, "tokens": data.train.total_tokens}


@contextmanager
def peak_of_own_memory() -> Iterator[dict[str, int]]:
    """{"bytes": the most anonymous memory so far above that at the beginning}"""

    def look() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def keep_looking() -> None:
        while not done.wait(1 / LOOKS_PER_SECOND):
            peak["bytes"] = max(peak["bytes"], look() - before)

    before, peak, done = look(), {"bytes": 0}, threading.Event()
    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak["bytes"] = max(peak["bytes"], look() - before)


def report(measured: dict) -> str:
    made, batch = measured["preparing"], measured["batches"]
    ratio = made["ours_per_s"] / made["datasets_per_s"]
    lines = [
        f"{measured['date']}, load {os.getloadavg()[0]:.1f}",
        "",
        f"preparing {made['tokens']:,} tokens of text: {made['ours_per_s']:,.0f} tokens/s, datasets.map {made['datasets_per_s']:,.0f} "
        f"(ours / its {ratio:.2f}); a later start {made['later_start_s'] * 1e3:.0f} ms",
        f"a batch of {batch['tokens_per_step']:,} tokens: {batch['batch_ms']:.2f} ms, {batch['share']:.1%} of {batch['step_ms']:.0f} ms",
        "",
        "| tokens of a pack | best fit (ours) | first fit | without packs | seconds for |",
        "| ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['max_tokens']:,} | {row['ours']:.2%} | {row['first_fit']:.2%} | {row['unpacked']:.2%} "
            f"| {row['seconds']:.2f} for {row['samples']:,} |"
            for row in measured["packing"]
        ),
        "",
        "| rows | tokens | peak MiB | of it preparing | bytes per row | rows/s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    smallest = measured["memory"][0]
    for row in measured["memory"]:
        more = row["rows"] - smallest["rows"]
        per_row = f"{(row['peak_bytes'] - smallest['peak_bytes']) / more:.0f}" if more else ""
        peaks = f"{row['peak_bytes'] / 2**20:.0f} | {row['preparing_bytes'] / 2**20:.0f}"
        lines.append(f"| {row['rows']:,} | {row['tokens']:,} | {peaks} | {per_row} | {row['rows'] / row['seconds']:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
