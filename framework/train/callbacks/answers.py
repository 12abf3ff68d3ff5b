"""What the model answers to some prompts on the way: on rank 0's console, in RUN/answers.jsonl and in the dashboard.

    {"step": 50, "prompt": "What is 2 + 3?", "answer": "5."}

Prompts are dealt over the ranks, and each is answered alone, as `framework generate` does it: the answers of a step are the same for any
number of ranks and ZeRO stage. Training does not notice: no gradient, no draw from torch's generators, dropout off.

Unusual: a sharded model is entered by all ranks together, and answers are of different lengths. So after each token the ranks agree
whether any of them goes on, and one whose answer is complete still takes part in the next forward, with a token that nobody reads. A
request to stop rides along; then there are no answers of this step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from framework.config.schema import EvalConfig
from framework.data.prompts import Prompt
from framework.models.generate import generate_ids
from framework.models.llama import KVCache
from framework.progress import busy
from framework.train.callbacks.progress import Progress
from framework.train.callbacks.stop import GracefulStop
from framework.train.loggers import Answer, Tracker

SHOWN_CHARACTERS = 70


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What only rank 0 knows at first."""

    prompts: Sequence[Prompt]
    stop_ids: Sequence[int]
    """Tokens that end an answer, as at inference."""
    tokenizer: Any


class Answers(pl.Callback):
    """Every rank has it.

    Args:
        questions: None on all ranks but 0.
        seed: of draws where `eval.temperature` is above 0.
        file: rank 0 appends to it.
        stop: whether there is time for answers.
    """

    def __init__(
        self,
        config: EvalConfig,
        questions: Questions | None,
        *,
        seed: int,
        file: Path,
        tracker: Tracker,
        progress: Progress,
        stop: GracefulStop,
    ) -> None:
        self.config, self.questions, self.seed, self.file = config, questions, seed, file
        self.tracker, self.progress, self.stop = tracker, progress, stop
        self._prompts: list[list[int]] = []  # token ids
        self._stop_ids: set[int] = set()
        self._answered: int | None = None  # step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        asked = self.questions and ([prompt.ids for prompt in self.questions.prompts], set(self.questions.stop_ids))
        self._prompts, self._stop_ids = trainer.strategy.broadcast(asked)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self.config.generate_every_n_steps
        if every is not None and trainer.global_step % every == 0:
            self.answer(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.config.generate_every_n_steps is None:
            self.answer(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.answer(trainer, pl_module)

    def answer(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Now, unless that was done at this step or the run is asked to stop. Collective."""
        step, world = trainer.global_step, trainer.strategy.engine.world
        if self._answered == step or self.stop.stopped_at_step is not None:
            return
        self._answered = step
        mine: dict[int, list[int]] = {}
        with busy("answering", show=trainer.is_global_zero), _evaluating(pl_module.model):
            for first in range(0, len(self._prompts), world.size):
                number = first + world.rank
                prompt = self._prompts[number] if number < len(self._prompts) else None
                ids = self._decode(pl_module.model, prompt, _agreement(trainer))
                if ids is None:
                    return
                mine[number] = ids
        found = {number: ids for of_rank in world.gather_objects(mine) for number, ids in of_rank.items()}
        if trainer.is_global_zero:
            self._tell(step, [found[number] for number in range(len(self._prompts))])
        self.progress.training_goes_on()

    @torch.no_grad()
    def _decode(self, model: nn.Module, prompt: list[int] | None, agree: Callable[[bool], tuple[bool, bool]]) -> list[int] | None:
        """Ids of the answer to `prompt` (None: this rank only takes part); None when all ranks are to stop. One forward for each token of
        the longest answer, on every rank."""
        answer: list[int] = []
        room = 0 if prompt is None else min(self.config.max_new_tokens, model.config.max_position_embeddings - len(prompt))
        tokens = generate_ids(model, prompt or [], room, temperature=self.config.temperature, seed=self.seed, stop_ids=self._stop_ids)
        idle, goes_on = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device), room > 0
        while True:
            any_goes_on, stop = agree(goes_on)
            if stop:
                return None
            if not any_goes_on:
                return answer
            if not goes_on:
                model(idle, cache=KVCache(model.config, 1), logits_to_keep=1)
                continue
            token = next(tokens, None)
            answer += [] if token is None else [token]
            goes_on = token is not None and len(answer) < room

    def _tell(self, step: int, answered: list[list[int]]) -> None:
        texts = [self.questions.tokenizer.decode(ids, skip_special_tokens=True) for ids in answered]
        answers = [Answer(prompt.text, text) for prompt, text in zip(self.questions.prompts, texts, strict=True)]
        with self.file.open("a", encoding="utf-8") as file:
            for prompt, text in answers:
                print(f"step {step:,}  {_short(prompt)} -> {_short(text)}", flush=True)
                file.write(json.dumps({"step": step, "prompt": prompt, "answer": text}, ensure_ascii=False) + "\n")
        self.tracker.log_answers(step, answers)


def continue_answers(old: Path, new: Path, step: int) -> None:
    """Begin `new` with the answers of `old` up to optimizer step `step`; nothing where there are none."""
    if not old.exists():
        return
    whole = old.read_text(encoding="utf-8").split("\n")[:-1]
    new.write_text("".join(f"{line}\n" for line in whole if json.loads(line)["step"] <= step), encoding="utf-8")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off inside; each module is put back into its mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _agreement(trainer: pl.Trainer) -> Callable[[bool], tuple[bool, bool]]:
    """A function that gives all ranks (does any of them go on?, is any of them asked to stop?)."""

    def agree(goes_on: bool) -> tuple[bool, bool]:
        flags = [float(goes_on), float(trainer.strategy.engine.stop_requested)]
        going, stopping = trainer.strategy.reduce(torch.tensor(flags, device=trainer.strategy.root_device), reduce_op="sum").tolist()
        return going > 0, stopping > 0

    return agree


def _short(text: str) -> str:
    text = json.dumps(text, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}..."'
