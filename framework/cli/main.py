"""The command `framework`: finds the command that is meant and hands the rest of the line to it. Imports nothing heavy."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from framework import __version__

COMMANDS = {
    "train": "train from a recipe: framework train +recipe=llama_sft zero=3",
    "check": "say what a training command would do, or everything that is wrong with it",
    "prepare": "tokenise data ahead, and look at samples: framework prepare +recipe=NAME --show 3",
    "generate": 'let a trained model answer: framework generate --model RUN "a prompt"',
    "eval": "loss and perplexity of a model on data: framework eval MODEL data.validation=FILE",
    "export": "write a model as a Hugging Face folder: framework export RUN OUT [--merge]",
    "checkpoint": "what a run has saved and whether it is whole: framework checkpoint ls|show|verify RUN",
    "help": "explain groups and settings: framework help [GROUP | GROUP.KEY]",
    "env": "versions, GPUs, cores and memory, for reports",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """`framework COMMAND ...`; ends the process with the command's exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print(usage())
        sys.exit(0)
    if command == "--version":
        print(f"framework {__version__}")
        sys.exit(0)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f"framework {near[0]} ..." if near else f"framework train {command} ..." if "=" in command else "framework --help"
        print(f"unknown command {command}; write\n    {meant}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(command, rest))


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    if command == "train":
        from framework.cli.train import main as train_main

        sys.argv = ["framework train", *arguments]
        train_main()
    if command == "prepare":
        from framework.cli import prepare

        return prepare.main(arguments)
    if command == "generate":
        from framework.cli import generate

        return generate.main(arguments)
    if command == "eval":
        from framework.cli import eval as evaluation

        return evaluation.main(arguments)
    if command == "export":
        from framework.cli import export

        return export.main(arguments)
    if command == "checkpoint":
        from framework.cli import checkpoint

        return checkpoint.main(arguments)
    if command == "check":
        from framework.cli import check

        return check.main(arguments)
    if command == "help":
        from framework.cli import reference

        return reference.main(arguments)
    from framework.cli import env

    return env.main(arguments)


def usage() -> str:
    """What `framework --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(["usage: framework COMMAND ...", "", *lines, "", "framework COMMAND --help says more about each."])


if __name__ == "__main__":
    main()
