"""`framework export MODEL OUT`: a folder for others of whatever MODEL leads to, tensor by tensor, on one process.

MODEL is whatever `generate` takes: a run, a checkpoint of it, one of DeepSpeed or torch, a Hugging Face folder, ... The adapter that a
checkpoint holds becomes an adapter folder, or with `--merge` one whole model; an adapter folder is one already, so it needs `--merge`. It
is merged into the original weights in floating point, also where it was trained over quantised ones (QLoRA).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from framework.checkpoint.folder import whole_checkpoints
from framework.checkpoint.source import CONFIG, Source, check_source, find_source
from framework.config.errors import Problem, UserError
from framework.config.schema import ModelConfig
from framework.models.locate import check_path
from framework.progress import loading_libraries

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
EXPORT = "export"
"""Of a run: the model as it was written at the end."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", re.IGNORECASE)


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    arguments = parser().parse_args(argv)
    try:
        _write(arguments, _checked(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f'export:  {arguments.out}\nask it:  framework generate --model {arguments.out} "your question"')
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="framework export", description="Write a model as a folder that other programs load.")
    notations = "a run, a checkpoint of it, of DeepSpeed or of torch, a Hugging Face or adapter folder, a .gguf file, a hub name"
    made.add_argument("model", metavar="MODEL", help=notations)
    made.add_argument("out", metavar="OUT", help="the new folder")
    made.add_argument("--format", choices=("hf", "dcp"), default="hf", help="Hugging Face (default), or torch.distributed.checkpoint")
    made.add_argument("--merge", action="store_true", help="add an adapter to the weights of the model that it was trained on")
    made.add_argument("--dtype", choices=tuple(DTYPES), help="of a whole model; default: bf16. Adapters are written in fp32")
    made.add_argument("--max-shard-size", metavar="SIZE", help="largest file of weights, as 5GB (default) or 500MB")
    made.add_argument("--tokenizer", metavar="PATH", help="in place of the one that belongs to the model")
    return made


def _checked(arguments: argparse.Namespace) -> Source:
    """Where the model is. Raises UserError with all that can be said before torch is imported."""
    problems = check_source(arguments.model, "MODEL", has_tokenizer=arguments.tokenizer is not None)
    source = None if problems else find_source(arguments.model, "MODEL")
    if source is not None:
        problems += _of_adapters(arguments, source) + _of_precision(arguments, source)
    if arguments.tokenizer is not None:
        problems += check_path(arguments.tokenizer, "--tokenizer", weights=False)
    out = Path(arguments.out).expanduser()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        problems.append(Problem(path="OUT", got=f"{out}, something that exists", expected="a new folder"))
    if arguments.max_shard_size is not None:
        if arguments.format == "dcp":
            got = f"{arguments.max_shard_size} with --format dcp"
            problems.append(Problem(path="--max-shard-size", got=got, expected="one of the two"))
        elif not _bytes(arguments.max_shard_size):
            expected = "a number above 0 with KB, MB or GB"
            problems.append(Problem(path="--max-shard-size", got=arguments.max_shard_size, expected=expected, fix="--max-shard-size 5GB"))
    if problems:
        raise UserError(*problems)
    return source


def _of_adapters(arguments: argparse.Namespace, source: Source) -> list[Problem]:
    if arguments.merge:
        got, expected = f"{source.path}, which is no adapter", "no --merge"
        return [] if source.is_adapter else [Problem(path="--merge", got=got, expected=expected)]
    if not source.is_adapter:
        return []
    if source.kind == "model":
        return [Problem(path="MODEL", got=f"{source.path}, an adapter, which peft loads as it is", expected="--merge, for a whole model")]
    options = {"--dtype": arguments.dtype, "--max-shard-size": arguments.max_shard_size, "--format": arguments.format}
    return [
        Problem(path=option, got=f"{value} for the adapter in {source.path}", expected="--merge, for a whole model")
        for option, value in options.items()
        if value not in (None, "hf")
    ]


def _of_precision(arguments: argparse.Namespace, source: Source) -> list[Problem]:
    """What RUN/export has lost when it was written does not come back; the run's checkpoints have it."""
    run = Path(arguments.model).expanduser()
    if DTYPES[arguments.dtype or "bf16"] != "float32" or source.is_adapter or source.folder != run / EXPORT:
        return []
    config = json.loads((source.folder / CONFIG).read_text())
    written = config.get("dtype", config.get("torch_dtype"))
    if written == "float32":
        return []
    got, expected = f"{arguments.dtype} of {source.path}, which was written in {written}", "a checkpoint, whose weights are fp32, or bf16"
    fix = f"framework export {found[-1]} OUT --dtype fp32" if (found := whole_checkpoints(run)) else f"--dtype {written}"
    return [Problem(path="--dtype", got=got, expected=expected, fix=fix)]


def _write(arguments: argparse.Namespace, source: Source) -> None:
    with loading_libraries():
        from framework.checkpoint.export import export_saved_adapter, export_weights
        from framework.checkpoint.load import Checkpoint
        from framework.checkpoint.open import CheckpointAdapter, open_model

    out = Path(arguments.out).expanduser()
    tokenizer = None if arguments.tokenizer is None else ModelConfig(tokenizer=arguments.tokenizer)
    if source.is_adapter and not arguments.merge:
        export_saved_adapter(out, CheckpointAdapter(Checkpoint(source.folder)), tokenizer)
        return
    export_weights(
        out,
        open_model(source.path, "MODEL"),
        layout=arguments.format,
        dtype=DTYPES[arguments.dtype or "bf16"],
        max_shard_bytes=_bytes(arguments.max_shard_size or "5GB"),
        tokenizer=tokenizer,
    )


def _bytes(size: str) -> int:
    """Of 5GB or 500MB; 0 for what is no size."""
    match = SIZE.fullmatch(size.strip())
    return round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
