"""The plan: what follows from recipe, model and data, and what does not fit together."""

from __future__ import annotations

import dataclasses
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from framework.config.errors import UserError
from framework.config.schema import (
    CheckpointConfig,
    DataConfig,
    LlamaConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PrecisionConfig,
    RecipeConfig,
    ScheduleConfig,
    TrainerConfig,
    ZeroConfig,
    ZeroModuleConfig,
)
from framework.models.architecture import parameter_count
from framework.models.llama import Llama
from framework.models.selection import parameter_groups
from framework.plan.describe import describe
from framework.plan.disk import require_room
from framework.plan.plan import DataFacts, Plan, make_plan
from framework.zero import ZeroEngine
from framework.zero.activations import HostActivations
from framework.zero.optimizer_by_name import build_optimizer

ARCHITECTURE = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256
)
RECIPE = RecipeConfig(
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="linear", warmup_steps=2),
    trainer=TrainerConfig(epochs=2, global_batch_size=8, micro_batch_size=2),
)
FACTS = DataFacts(samples=42, tokens=4200, trained_tokens=1000, longest=200, largest_id=299, digest="d")


def plan(recipe: RecipeConfig = RECIPE, facts: DataFacts = FACTS, ranks: int = 2) -> Plan:
    return make_plan(recipe, ARCHITECTURE, facts, None, ranks)


def test_steps_batch_and_rates_follow_from_the_data() -> None:
    made = plan()
    assert (made.steps.steps_per_epoch, made.steps.total_steps) == (6, 12)
    assert (made.batch.micro_batch_size, made.batch.accumulate, made.batch.world_size) == (2, 2, 2)
    assert (made.lr(0), made.lr(1), made.lr(11)) == (5e-4, 1e-3, 0.0)
    assert made.tokens_per_step == 800


def test_parameters_are_those_of_the_architecture() -> None:
    assert plan().parameters == plan().trained_parameters == parameter_count(ARCHITECTURE)


@pytest.mark.parametrize(("dtype", "bytes_per_parameter"), [("float32", 16), ("bfloat16", 18), ("float64", 32)])
def test_stage_0_on_one_rank_holds_parameters_gradients_masters_and_two_moments(dtype: str, bytes_per_parameter: int) -> None:
    made = plan(dataclasses.replace(RECIPE, precision=PrecisionConfig(compute_dtype=dtype)), ranks=1)
    assert made.state_bytes(0).total == pytest.approx(bytes_per_parameter * made.parameters, rel=0.04)  # alignment


def measured(made: Plan, rows: int = 1, tokens: int = 8, steps: int = 2) -> ZeroEngine:
    """An engine after some steps with micro-batches of so many rows and tokens."""
    recipe, model = made.recipe, Llama(ARCHITECTURE, activation_checkpointing=made.recomputed)
    optimizer = build_optimizer(recipe.optimizer, parameter_groups(model, recipe.optimizer))
    engine = ZeroEngine(model, recipe.zero, recipe.precision, recipe.offload, optimizer=optimizer)
    model.model.input_saver = HostActivations(engine) if recipe.model.activation_offload else None
    for number in range(steps * made.batch.accumulate):
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        last = (number + 1) % made.batch.accumulate == 0
        engine.backward(model(ids, ids, trained_tokens=ids.numel()), ids.numel(), last=last)
        if last:
            engine.step()
    engine.flush()
    return engine


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (OptimizerConfig(), PrecisionConfig()),
        (OptimizerConfig(), PrecisionConfig(compute_dtype="bfloat16", master_weights="remainder")),
        (OptimizerConfig(), PrecisionConfig(compute_dtype="bfloat16", fp32_modules=["norm"])),
        (OptimizerConfig(), PrecisionConfig(compute_dtype="float64")),
        (OptimizerConfig(moments="8bit"), PrecisionConfig()),
        (OptimizerConfig(name="lion"), PrecisionConfig()),
        (OptimizerConfig(name="sgd", momentum=0.9), PrecisionConfig()),
        (OptimizerConfig(name="muon"), PrecisionConfig()),
        (OptimizerConfig(name="adafactor"), PrecisionConfig()),
        (OptimizerConfig(name="rmsprop"), PrecisionConfig()),
    ],
)
def test_the_peak_is_that_of_the_engines_meter_to_the_byte(optimizer: OptimizerConfig, precision: PrecisionConfig) -> None:
    """Also where parameters are smaller than their alignment, and kernels update the gaps between them."""
    for stage in range(4):
        recipe = dataclasses.replace(RECIPE, optimizer=optimizer, precision=precision, zero=ZeroConfig(stage=stage))
        made = plan(recipe, ranks=1)
        engine, state = measured(made), made.state_bytes(stage)
        assert engine.memory.peak == state.total, stage
        assert engine.memory.by_kind["optimizer"] == state.optimizer, stage


def sent_and_planned(recipe: RecipeConfig) -> tuple[int, int]:
    """By this rank in a step like all but the first."""
    made = plan(recipe)
    shorter, engine = measured(made, steps=2), measured(made, steps=3)
    return engine.bytes_sent - shorter.bytes_sent, made.bytes_sent(recipe.zero.stage, engine.world.rank)


@pytest.mark.parametrize("optimizer", [OptimizerConfig(name="muon"), OptimizerConfig(name="adafactor"), OptimizerConfig()], ids=str)
def test_bytes_sent_in_a_step_are_the_engines_where_modules_have_policies_of_their_own(ranks, optimizer: OptimizerConfig) -> None:
    rules = [ZeroModuleConfig(pattern="layers.1", stage=0), ZeroModuleConfig(pattern="embed_tokens", stage=1)]
    for stage in (0, 2, 3):
        recipe = dataclasses.replace(RECIPE, optimizer=optimizer, zero=ZeroConfig(stage=stage, modules=rules))
        for sent, planned in ranks(2, sent_and_planned, recipe):
            assert sent == planned, stage


def test_every_stage_shards_more_of_what_stays() -> None:
    per_rank = [plan(ranks=4).state_bytes(stage) for stage in (0, 1, 2, 3)]
    stays = [state.total - state.temporary for state in per_rank]
    assert stays == sorted(stays, reverse=True)
    assert stays[3] == pytest.approx(stays[0] / 4, rel=0.1)  # small parameters: the alignment of each shows


def test_the_page_says_what_a_rank_sends_and_what_compression_makes_of_it() -> None:
    def page(**zero) -> tuple[list[str], int]:
        made = plan(dataclasses.replace(RECIPE, zero=ZeroConfig(stage=3, **zero)), ranks=4)
        return describe(made).splitlines(), made.bytes_sent(3)

    lines, plainly = page()
    assert not any(line.startswith("compression") for line in lines)
    lines, compressed = page(gather_compression="int8", reduce_compression="int8", error_feedback=True)
    assert any(
        re.fullmatch(r"compression +parameters are sent in int8, gradients are sent in int8 with error feedback", line) for line in lines
    )
    assert "temporary    feedback        peak" in "\n".join(lines)
    assert compressed == pytest.approx((1 + 4 / 64) / 4 * plainly, rel=0.01)


@pytest.mark.parametrize(
    ("facts", "message", "fix"),
    [
        ({"largest_id": 300}, "the id 300", "model.arch.vocab_size=301"),
        ({"longest": 257}, "a sample of 257 tokens", "data.max_tokens=256"),
    ],
)
def test_data_that_the_model_cannot_take_are_refused(facts: dict, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(facts=dataclasses.replace(FACTS, **facts))
    assert caught.value.problems[0].fix == fix


def test_p25_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="warm-up"):
        plan(dataclasses.replace(RECIPE, schedule=ScheduleConfig(name="linear", warmup_steps=12)))


def test_p36_whatever_differs_changes_the_fingerprint() -> None:
    others = [
        plan(dataclasses.replace(RECIPE, seed=1)),
        plan(facts=dataclasses.replace(FACTS, digest="e")),
        plan(ranks=1),
    ]
    assert len({plan().fingerprint, *(other.fingerprint for other in others)}) == 4
    assert plan().fingerprint == plan().fingerprint


def test_the_page_names_every_number_and_marks_the_chosen_stage() -> None:
    page = describe(plan(dataclasses.replace(RECIPE, zero=dataclasses.replace(RECIPE.zero, stage=2))))
    for expected in (
        "42 samples, 4,200 tokens, 1,000 trained; longest 200",
        "12 = 2 epochs of 6",
        "linear: step 1 0.0005",
        "2 micro x 2 accumulated",
    ):
        assert expected in page
    assert [line[:8] for line in page.splitlines() if line.startswith(">")] == ["> zero=2"]


def test_the_page_says_when_is_saved_how_much_and_what_training_waits_for() -> None:
    share = 12 * parameter_count(ARCHITECTURE) / 2 / 2**20
    assert plan(ranks=2).checkpoint_bytes / 2**20 == pytest.approx(share, rel=0.05)
    for config, expected in (
        (
            CheckpointConfig(),
            "every 500 steps, when stopped; 0.3 MiB per rank, first copied in host memory, then written while training goes on",
        ),
        (
            CheckpointConfig(every_n_steps=None, keep_best=1, asynchronous=False),
            "at the best validations, when stopped; 0.3 MiB per rank, training waits",
        ),
        (CheckpointConfig(every_n_steps=None, on_stop=False), "none"),
    ):
        page = describe(plan(dataclasses.replace(RECIPE, checkpoint=config)))
        (line,) = [line for line in page.splitlines() if line.startswith("checkpoints")]
        assert line.partition("  ")[2].strip() == expected


def test_the_page_counts_packs_and_says_how_full_they_are() -> None:
    packed = dataclasses.replace(RECIPE, data=DataConfig(packing=True, max_tokens=256))
    page = describe(plan(packed, dataclasses.replace(FACTS, samples=17, packed=42)))
    for expected in (
        "42 samples, 4,200 tokens, 1,000 trained; longest 200",
        "42 samples in 17 packs of at most 256 tokens, 96.5% full; attention: one sample after the other",
        "= 8 packs per step",
        "6 = 2 epochs of 3",
    ):
        assert expected in page


@pytest.mark.parametrize(
    ("ends", "remark"),
    [
        ({"max_steps": 200, "epochs": 2}, "; trainer.epochs=2 comes before trainer.max_steps=200"),
        ({"max_steps": 3, "epochs": 2}, "; trainer.max_steps=3 comes before trainer.epochs=2"),
        ({"max_steps": 12, "epochs": 2}, ""),
        ({"epochs": 2}, ""),
    ],
)
def test_the_page_says_which_end_is_not_reached(ends: dict, remark: str) -> None:
    trainer = dataclasses.replace(RECIPE.trainer, **{"max_steps": None, "epochs": None} | ends)
    (line,) = [line for line in describe(plan(dataclasses.replace(RECIPE, trainer=trainer))).splitlines() if line.startswith("steps")]
    assert line.endswith(f" tokens{remark}")


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        (ZeroConfig(stage=3, shard_size=4), ["2 groups of 4 ranks, the same in each; optimizer state over a group"]),
        (
            ZeroConfig(stage=2, shard_size=2, shard_optimizer="world"),
            ["4 groups of 2 ranks, the same in each; optimizer state over all 8 ranks"],
        ),
        (ZeroConfig(stage=3, secondary_shard_size=2), ["over 8 ranks; between forward and backward in shards over groups of 2"]),
        (
            ZeroConfig(
                stage=3,
                keep_gathered_bytes=45_000,
                modules=[
                    ZeroModuleConfig(pattern="embed_tokens", stage=2),
                    ZeroModuleConfig(pattern="layers.2", reshard_after_forward=False),
                ],
            ),
            [
                "stage 2 for embed_tokens",
                "stage 3, whole until backward for layers.2",
                "1 of 3 blocks always gathered, in 45,000 bytes",
            ],
        ),
        (
            ZeroConfig(stage=3, keep_gathered_bytes=2**30),
            ["3 of 3 blocks and the rest of the model always gathered, in 1,073,741,824 bytes"],
        ),
        (ZeroConfig(stage=3), []),
    ],
)
def test_the_page_says_where_state_lies_and_what_a_step_sends(zero: ZeroConfig, told: list[str]) -> None:
    trainer = dataclasses.replace(RECIPE.trainer, micro_batch_size=1)
    made = plan(dataclasses.replace(RECIPE, zero=zero, trainer=trainer), ranks=8)
    page = describe(made).splitlines()
    (chosen,) = [line for line in page if line.startswith(">")]
    assert float(chosen.split()[-1].replace(",", "")) == pytest.approx(made.bytes_sent(zero.stage) / 2**20, abs=0.05)
    assert [line for line in page if line.startswith("sharding")] == [f"sharding       {told[0]}"] if told else True
    for line in told:
        assert line in "\n".join(page)


def test_groups_send_less_between_machines_and_hold_more() -> None:
    def of(zero: ZeroConfig) -> tuple[int, int]:
        trainer = dataclasses.replace(RECIPE.trainer, micro_batch_size=1)
        made = plan(dataclasses.replace(RECIPE, zero=zero, trainer=trainer), ranks=8)
        state = made.state_bytes(3)
        return state.total - state.temporary, made.checkpoint_bytes

    flat, hybrid, world, secondary = map(
        of,
        (
            ZeroConfig(stage=3),
            ZeroConfig(stage=3, shard_size=4),
            ZeroConfig(stage=3, shard_size=4, shard_optimizer="world"),
            ZeroConfig(stage=3, secondary_shard_size=4),
        ),
    )
    assert flat[0] == secondary[0] < world[0] < hybrid[0]
    assert flat[1] == world[1] == secondary[1]


def test_the_page_says_what_lies_on_the_disk_and_what_a_step_moves(tmp_path) -> None:
    offload = OffloadConfig(optimizer="nvme", nvme_path=str(tmp_path))
    made = plan(dataclasses.replace(RECIPE, offload=offload, zero=ZeroConfig(stage=2)))
    mebibytes = 12 * parameter_count(ARCHITECTURE) / 2 / 2**20
    assert made.state_bytes(2).disk / 2**20 == pytest.approx(mebibytes, rel=0.2)  # each block in whole pages
    assert made.disk_traffic == (made.state_bytes(2).disk,) * 2
    assert made.checkpoint_copy_bytes == 0 < made.checkpoint_bytes
    page = describe(made)
    shown = f"{made.state_bytes(2).disk / 2**20:,.1f}"
    assert f"optimizer state in {tmp_path}, {shown} MiB per rank; a step reads {shown} and writes {shown} MiB per rank" in page
    assert "0.3 MiB per rank, 0.0 of them first copied in host memory, written while training goes on" in page


def test_a_disk_without_room_is_refused_before_the_run(tmp_path, monkeypatch) -> None:
    made = plan(dataclasses.replace(RECIPE, offload=OffloadConfig(optimizer="nvme", nvme_path=str(tmp_path))))
    require_room(made)
    needed = made.state_bytes(0).disk
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match="where 0.0 GiB are free") as caught:
        require_room(made)
    assert caught.value.problems[0].path == "offload.nvme_path"


def recomputing(**model: object) -> Plan:
    return plan(dataclasses.replace(RECIPE, model=ModelConfig(**model)))


def test_activations_are_printed_with_the_blocks_that_are_recomputed() -> None:
    assert plan().activations is None and "activations " not in describe(plan()).split("model state")[0]
    for setting, chosen in ((True, (0, 1, 2)), (2, (0, 2))):
        assert recomputing(activation_checkpointing=setting).recomputed == chosen
    made = recomputing(activation_checkpointing=True, activation_offload=True)
    assert made.activations.on_host(made.recomputed) == 3 * 2 * 200 * 32 * 4  # blocks, rows, tokens, width, bytes
    assert "0.1 MiB on the host; 3 of 3 blocks are recomputed" in describe(made)


def column(page: str, name: str) -> str:
    """What the table says of the chosen stage below the end of `name`."""
    head, *rows = page[page.index("model state per rank") :].splitlines()[1:]
    (chosen,) = [row for row in rows if row.startswith(">")]
    return chosen[: head.index(name) + len(name)].split()[-1]


@pytest.mark.parametrize(("offload", "every"), [(OffloadConfig(), True), (OffloadConfig(optimizer="cpu"), 2)])
def test_the_host_column_counts_the_activations_that_are_kept_there(offload: OffloadConfig, every: bool | int) -> None:
    model = ModelConfig(activation_checkpointing=every, activation_offload=True)
    recipe, alike = dataclasses.replace(RECIPE, model=model, offload=offload), dataclasses.replace(FACTS, tokens=42 * 200)
    exact, varying = plan(recipe, alike, ranks=1), plan(recipe, ranks=1)
    nbytes = exact.state_bytes(0).host + exact.activation_host_bytes
    assert measured(exact, *exact.micro_batch_shape).host_memory.peak == nbytes
    assert column(describe(exact), "on host") == column(describe(varying), "on host, at most") == f"{nbytes / 2**20:.1f}"
    assert measured(varying, 2, 150).host_memory.peak < nbytes
    assert "at most" not in describe(exact) and "activations    at most" in describe(varying)
    without_warmup = dataclasses.replace(recipe, schedule=ScheduleConfig(name="constant"))
    few = plan(without_warmup, dataclasses.replace(alike, samples=7, tokens=7 * 200), ranks=1)
    assert few.micro_batches_vary, "no step has rows for all slots"


def test_a_budget_for_activations_recomputes_as_few_blocks_as_it_allows_and_is_refused_below_its_least() -> None:
    made = recomputing(activation_checkpointing=True).activations
    needed = made.peak((0,), offloads=False)
    assert recomputing(activation_budget_bytes=needed).recomputed == (0,)
    assert recomputing(activation_budget_bytes=needed - 1).recomputed == (0, 1)
    least = made.peak((0, 1, 2), offloads=False)
    with pytest.raises(UserError, match=f"at least {least:,} bytes") as caught:
        recomputing(activation_budget_bytes=1000)
    assert caught.value.problems[0].fix.startswith(f"model.activation_budget_bytes={least}")


def test_the_state_of_each_optimizer_takes_its_own_bytes() -> None:
    embedding, matrices = 300 * 32 * 2, 3 * (4 * 32 * 32 + 3 * 32 * 48)
    vectors = 3 * 64 + 32
    factored = 2 * (300 + 32) + 3 * (4 * 64 + 3 * 80) + vectors
    for optimizer, expected, said in (
        (OptimizerConfig(name="muon"), 4 * matrices + 8 * (embedding + vectors), "orthogonal steps for 21 matrices in blocks"),
        (OptimizerConfig(name="adafactor"), 4 * factored, ""),
        (OptimizerConfig(moments="8bit"), 2 * embedding * 65 // 64 + 8 * (matrices + vectors), "in 8 bits"),
    ):
        made = plan(dataclasses.replace(RECIPE, optimizer=optimizer), ranks=1)
        assert made.state_bytes(0).optimizer == pytest.approx(expected, rel=1e-3)
        assert made.checkpoint_bytes == pytest.approx(4 * made.parameters + expected, rel=0.08), "the alignment of each"
        assert said in describe(made)
