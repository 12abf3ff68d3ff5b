"""What a run looks at on the way: a loss for each source of validation data, answers to prompts, and when it learns no more."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from framework.checkpoint.folder import checkpoints, resolve, step_folder
from framework.checkpoint.open import open_model
from framework.cli import generate as command
from framework.config.schema import CheckpointConfig, EvalConfig, PeftConfig, PrecisionConfig, RecipeConfig, SourceConfig, ZeroConfig
from framework.data.prepare import prepare
from framework.models.generate import generate, load_for_generation
from framework.models.tokenizer import load_tokenizer
from framework.train.metrics import read_metrics, series
from framework.train.run_dir import ANSWERS, EXPORT, METRICS, read_summary, write_run_dir
from tests.cli import test_fit_lora
from tests.cli.test_fit import fit, recipe  # noqa: F401  a fixture

lora = test_fit_lora.recipe
EXACT = CheckpointConfig(every_n_steps=None, export_dtype="float32")
PROMPTS = ["say xx", "say", "what is written here?"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
    """Two files whose rows differ in number and length."""
    folder, paths = tmp_path_factory.mktemp("validation"), []
    for name, rows, length in (("short", 7, 2), ("long", 4, 31)):
        turns = [
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "y" * (length + i % 3)}] for i in range(rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
        paths.append(str(folder / f"{name}.jsonl"))
    return paths


def run(ranks, world_size: int, recipe: RecipeConfig, run_dir: Path, stage: int = 3, steps: int = 3, **changes: object) -> Path:  # noqa: F811
    trainer = dataclasses.replace(recipe.trainer, max_steps=steps)
    recipe = dataclasses.replace(recipe, **{"checkpoint": EXACT, "zero": ZeroConfig(stage=stage), "trainer": trainer, **changes})
    write_run_dir(run_dir, recipe, overrides=[], command=["test"])
    ranks(world_size, fit, recipe, run_dir, timeout=120)
    return run_dir


def exact_losses(recipe: RecipeConfig, sources: list[str], export: Path) -> tuple[dict[str, float], float]:  # noqa: F811
    """Of each source and of all tokens, by transformers, one row at a time in fp64."""
    model, sums = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float64), {}
    for path in sources:
        data = prepare(dataclasses.replace(recipe.data, train=path), load_tokenizer(recipe.model), seed=0, show_progress=False).train
        sums[Path(path).stem] = torch.zeros(2, dtype=torch.float64)
        for row in (data[i] for i in range(len(data))):
            ids, trained = torch.tensor(row.input_ids[None], dtype=torch.int64), torch.tensor(row.trained[1:])
            with torch.no_grad():
                logits = model(ids).logits[0, :-1]
            sums[Path(path).stem] += torch.tensor([cross_entropy(logits[trained], ids[0, 1:][trained], reduction="sum"), trained.sum()])
    loss_sum, tokens = sum(sums.values())
    return {name: (both[0] / both[1]).item() for name, both in sums.items()}, (loss_sum / tokens).item()


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 8), (2, 1)])
def test_p19_every_source_has_its_exact_loss_whatever_the_batches_and_ranks(
    ranks,
    recipe,  # noqa: F811
    sources,
    tmp_path,
    world_size: int,
    micro_batch_size: int,
) -> None:
    data = dataclasses.replace(recipe.data, validation_fraction=0, validation=[sources[0], SourceConfig(path=sources[1])])
    trainer = dataclasses.replace(recipe.trainer, max_steps=3, micro_batch_size=micro_batch_size)
    run_dir = run(ranks, world_size, recipe, tmp_path / "run", data=data, trainer=trainer)
    of_sources, of_all = exact_losses(
        dataclasses.replace(recipe, data=dataclasses.replace(data, validation=None)), sources, run_dir / EXPORT
    )
    row = [row for row in read_metrics(run_dir / METRICS) if row.val_loss is not None][-1]
    assert (row.val_loss, row.val_perplexity) == (pytest.approx(of_all, rel=1e-6), pytest.approx(math.exp(of_all), rel=1e-5))
    assert row.val_loss_of == pytest.approx(of_sources, rel=1e-6) and of_sources["short"] != pytest.approx(of_sources["long"], rel=1e-2)
    summary = read_summary(run_dir)
    assert summary["validation_perplexity"] == math.exp(summary["validation_loss"])
    assert {source["source"]: source["loss"] for source in summary["validation"]} == row.val_loss_of


# ---- answers
def answers(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / ANSWERS).read_text().splitlines()]


def asked(**options: object) -> EvalConfig:
    return EvalConfig(prompts=PROMPTS, max_new_tokens=9, **options)


def test_answers_are_those_of_the_exported_model_for_every_stage_and_number_of_ranks_and_training_does_not_notice(
    ranks,
    recipe,  # noqa: F811
    tmp_path,
) -> None:
    silent = run(ranks, 2, recipe, tmp_path / "silent", eval=EvalConfig(every_n_steps=2))
    alone = run(ranks, 1, recipe, tmp_path / "alone", stage=0, eval=asked(every_n_steps=2))
    sharded = run(ranks, 2, recipe, tmp_path / "sharded", eval=asked(every_n_steps=2))
    assert [answer["step"] for answer in answers(sharded)] == [2, 2, 2, 3, 3, 3]
    assert answers(sharded) == answers(alone)
    assert [row.loss for row in read_metrics(sharded / METRICS)] == [row.loss for row in read_metrics(silent / METRICS)]
    model, tokenizer, stop_ids = load_for_generation(open_model(str(sharded)), show=False)
    for answer, prompt in zip(answers(sharded)[3:], PROMPTS, strict=True):
        expected = generate(model, tokenizer, [{"role": "user", "content": prompt}], 9, stop_ids=stop_ids)
        assert (answer["prompt"], answer["answer"]) == (prompt, expected)


def test_an_adapter_with_dropout_trains_as_without_answers_and_its_answers_are_without_dropout(ranks, lora, tmp_path) -> None:
    changes = {"peft": PeftConfig(method="lora", rank=4, alpha=8.0, dropout=0.5)}
    silent = run(ranks, 2, lora, tmp_path / "silent", **changes)
    talking = run(ranks, 2, lora, tmp_path / "talking", eval=asked(generate_every_n_steps=1), **changes)
    assert series(read_metrics(talking / METRICS), "loss") == series(read_metrics(silent / METRICS), "loss")
    assert [answer["step"] for answer in answers(talking)] == [1] * 3 + [2] * 3 + [3] * 3
    model, tokenizer, stop_ids = load_for_generation(open_model(str(talking)), show=False)
    last = [generate(model, tokenizer, [{"role": "user", "content": prompt}], 9, stop_ids=stop_ids) for prompt in PROMPTS]
    assert [answer["answer"] for answer in answers(talking)[-3:]] == last


@contextmanager
def seen_without_grad() -> Iterator[set[torch.dtype]]:
    """Data types of what linear layers compute inside, where no gradient is asked for."""
    seen: set[torch.dtype] = set()

    def look(module: torch.nn.Module, arguments: tuple, out: object) -> None:
        if isinstance(module, torch.nn.Linear) and not torch.is_grad_enabled():
            seen.add(out.dtype)

    hook = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def fit_seen(recipe: RecipeConfig, run_dir: Path) -> set[torch.dtype]:  # noqa: F811
    with seen_without_grad() as seen:
        fit(recipe, run_dir)
    return seen


def test_a_run_under_autocast_answers_under_it_on_the_way_and_in_the_command(ranks, recipe, tmp_path, capsys) -> None:  # noqa: F811
    run_dir, trainer = tmp_path / "run", dataclasses.replace(recipe.trainer, max_steps=2)
    data = dataclasses.replace(recipe.data, validation_fraction=0.0)
    changes = {"trainer": trainer, "data": data, "precision": PrecisionConfig(autocast="bfloat16"), "zero": ZeroConfig(stage=3)}
    changed = dataclasses.replace(recipe, **changes, checkpoint=dataclasses.replace(EXACT, at_end=True), eval=asked())
    write_run_dir(run_dir, changed, overrides=[], command=["test"])
    assert ranks(1, fit_seen, changed, run_dir, timeout=120) == [{torch.bfloat16}]
    expected = answers(run_dir)[-1]
    for model in (run_dir, run_dir / EXPORT, step_folder(run_dir, 2)):
        with seen_without_grad() as seen:
            assert command.main(["--model", str(model), expected["prompt"], "--max-new-tokens", "9"]) == 0
        assert seen == {torch.bfloat16}
        assert capsys.readouterr().out == expected["answer"] + "\n"


# ---- the end of a run that learns no more
def test_a_run_that_learns_no_more_ends_early_and_one_that_goes_on_from_it_goes_on_counting(ranks, recipe, tmp_path) -> None:  # noqa: F811
    changes = {
        "eval": EvalConfig(every_n_steps=1, patience=3, min_delta=100.0),
        "checkpoint": CheckpointConfig(every_n_steps=1, keep=9),
        "runs_dir": str(tmp_path),
    }
    first = run(ranks, 2, recipe, tmp_path / "tiny" / "first", steps=9, **changes)
    summary = read_summary(first)
    assert (summary["ended"], summary["steps"]) == ("early", 4), "the first validation is the best, three more are not better"
    assert summary["reason"].startswith("3 validations in a row without a loss by 100 below ")
    assert (first / EXPORT / "config.json").is_file()
    assert resolve("auto", tmp_path, "tiny") is None, "it is done: resume=auto starts anew"

    second = run(ranks, 1, recipe, tmp_path / "tiny" / "second", steps=9, resume=str(step_folder(first, 3)), **changes)
    assert (read_summary(second)["ended"], read_summary(second)["steps"]) == ("early", 4)
    assert series(read_metrics(second / METRICS), "val_loss")[0] == [1, 2, 3, 4]
    assert [int(folder.name.rpartition("_")[2]) for folder in checkpoints(second)] == [4]
