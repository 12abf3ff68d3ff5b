"""`framework generate --model RUN|CHECKPOINT|FOLDER|FILE.gguf|pkg://... "prompt"`: an answer, printed while it is made.

With `-` for the prompt, each line of standard input is one, and the model is loaded once for all of them.

Unusual: torch is imported after the arguments and the model's path have been looked at, so that a mistake is told in well under a second.
"""

from __future__ import annotations

import argparse
import os
import sys

import yaml

from framework.checkpoint.folder import read_index
from framework.checkpoint.source import check_source, find_source
from framework.config.errors import Problem, UserError
from framework.config.schema import PrecisionConfig
from framework.config.typed import from_dict
from framework.progress import loading_libraries
from framework.train.run_dir import CONFIG, EXPORT

STANDARD_INPUT = "-"
MOST_THREADS = 8
"""One token at a time is bound by memory; more threads wait for each other."""


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 for a user's mistake."""
    arguments = parser().parse_args(argv)
    try:
        _check(arguments)
        _answer(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="framework generate", description="Answer a prompt with a trained or pretrained model.")
    made.add_argument("prompt", help="the question, or with --raw the text to continue; -: one in each line of standard input")
    made.add_argument(
        "--model", required=True, help="a run, a checkpoint, a Hugging Face folder, a .gguf file, pkg://PACKAGE/FILE or org/name"
    )
    made.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer in tokens (default 256)")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the likeliest token")
    made.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that together reach P")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling")
    made.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    made.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")
    return made


def _check(arguments: argparse.Namespace) -> None:
    """All that can be said before torch is imported, at once."""
    problems = []

    def expect(legal: bool, option: str, got: object, expected: str) -> None:
        if not legal:
            problems.append(Problem(path=option, got=repr(got), expected=expected))

    expect(arguments.max_new_tokens > 0, "--max-new-tokens", arguments.max_new_tokens, "a positive number")
    expect(arguments.temperature >= 0, "--temperature", arguments.temperature, "0 or more")
    expect(0 < arguments.top_p <= 1, "--top-p", arguments.top_p, "above 0 and at most 1")
    expect(arguments.prompt.strip() != "", "prompt", arguments.prompt, "a text")
    expect(not (arguments.raw and arguments.system), "--system", arguments.system, "no system prompt with --raw, which has no conversation")
    problems += check_source(arguments.model, "--model")
    if problems:
        raise UserError(*problems)


def _autocast(model: str) -> str:
    """What the forward of a run ran under, whose directory, checkpoint or export `model` is (`precision.autocast`); none for others."""
    source, recipe = find_source(model, "--model"), {}
    if source.kind == "checkpoint":
        recipe = read_index(source.folder)["run"].get("recipe", {})
    elif source.folder.name == EXPORT and (config := source.folder.parent / CONFIG).is_file():
        recipe = yaml.safe_load(config.read_text()) or {}
    return from_dict(PrecisionConfig, recipe.get("precision", {})).autocast


def _answer(arguments: argparse.Namespace) -> None:
    with loading_libraries():
        import torch

        from framework.checkpoint.open import open_model
        from framework.models.generate import generate, load_for_generation

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2)))

    autocast = _autocast(arguments.model)
    model, tokenizer, stop_ids = load_for_generation(open_model(arguments.model, "--model"), autocast=autocast)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []

    def answer(prompt: str) -> None:
        generate(
            model,
            tokenizer,
            prompt if arguments.raw else [*system, {"role": "user", "content": prompt}],
            arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            stop_ids=stop_ids,
            on_text=lambda text: print(text, end="", flush=True),
        )
        print()

    if arguments.prompt != STANDARD_INPUT:
        answer(arguments.prompt)
        return
    for line in sys.stdin:
        if prompt := line.strip():
            print(f"> {prompt}")
            answer(prompt)
            print()
