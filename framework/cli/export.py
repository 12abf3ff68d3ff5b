"""`framework export MODEL OUT`: a Hugging Face folder of a trained or pretrained model, tensor by tensor.

MODEL is whatever `generate` takes. An adapter becomes one whole model with `--merge`; without, it is refused, for it is a folder already.
It is merged into the original weights in floating point, also where it was trained over quantised ones (QLoRA).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.models.locate import check_path, export_of_run, is_adapter
from framework.progress import loading_libraries

GIGABYTE = 10**9


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    arguments = parser().parse_args(argv)
    try:
        source = _checked(arguments)
        with loading_libraries():
            from framework.models.pretrained import open_pretrained, write_pretrained
            from framework.models.tokenizer import tokenizer_from
        pretrained = open_pretrained(source, "MODEL")
        write_pretrained(
            Path(arguments.out).expanduser(),
            pretrained.config,
            ((name, pretrained.read(name, 0, shape.numel()).view(shape)) for name, shape in pretrained.names().items()),
            dtype=arguments.dtype,
            tokenizer=tokenizer_from(pretrained.tokenizer_source, "MODEL"),
            generation_config=pretrained.generation_config,
            max_shard_bytes=round(arguments.max_shard_gb * GIGABYTE),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f'export:  {arguments.out}\nask it:  framework generate --model {arguments.out} "your question"')
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="framework export", description="Write a model as a Hugging Face folder that transformers loads.")
    made.add_argument("model", metavar="MODEL", help="a run directory, an adapter or Hugging Face folder, a .gguf file, a hub name")
    made.add_argument("out", metavar="OUT", help="the new folder")
    made.add_argument("--merge", action="store_true", help="add an adapter to the weights of the model that it was trained on")
    made.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="default: bfloat16")
    made.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest file of weights, in 10^9 bytes (default 5)")
    return made


def _checked(arguments: argparse.Namespace) -> str:
    """Where the model is. Raises UserError with all that can be said before torch is imported."""
    source = export_of_run(arguments.model, "MODEL")
    problems = check_path(source, "MODEL")
    adapter = is_adapter(Path(source).expanduser())
    if adapter and not arguments.merge:
        problems.append(
            Problem(path="MODEL", got=f"{source}, an adapter, which peft loads as it is", expected="--merge, for a whole model")
        )
    if arguments.merge and not adapter and not problems:
        problems.append(Problem(path="--merge", got=f"{source}, which is no adapter", expected="no --merge"))
    out = Path(arguments.out).expanduser()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        problems.append(Problem(path="OUT", got=f"{out}, something that exists", expected="a new folder"))
    if arguments.max_shard_gb <= 0:
        problems.append(Problem(path="--max-shard-gb", got=f"{arguments.max_shard_gb:g}", expected="above 0"))
    if problems:
        raise UserError(*problems)
    return source
