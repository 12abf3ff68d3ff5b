"""Compressed communication is what plain torch makes of the same rounding, in one process: quantise, add in the order of ranks, go on."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from framework.zero import NonFiniteError, OffloadConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from framework.zero.comm import Comm
from framework.zero.eight_bit import AdamW8bit
from framework.zero.wire import Bf16Reduce, BlockReduce, Blocks, HierarchicalReduce, Int8Gather
from tests.zero import zoo

STEPS, MICROS, CLIP, LR = 3, 4, 0.5, 0.3


# ---- what is said of the format, in plain torch
def rounded(values: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Once to `bits` and back, in blocks of 64 with a scale each; fp32."""
    limit = {8: 127, 4: 7}[bits]
    rows = torch.nn.functional.pad(values.flatten().float(), (0, -values.numel() % 64)).view(-1, 64)
    scale = rows.abs().amax(1, keepdim=True) / limit
    q = torch.where(scale > 0, (rows * (1 / scale)).round(), 0)
    return (q * scale).flatten()[: values.numel()].view(values.shape)


def sent(values: torch.Tensor, how: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What arrives of `values`; `residual` is added, and keeps what is lost."""
    if how == "none":
        return values
    if how == "bf16":
        return values.bfloat16().float()
    whole = values if residual is None else values + residual
    arrived = rounded(whole, 4 if how == "int4" else 8)
    if residual is not None:
        residual.copy_(whole - arrived)
    return arrived


def train_emulated(name: str, zero: ZeroConfig, world_size: int, dtype: torch.dtype = torch.float32) -> dict:
    """All ranks' work in one process, in turn."""
    model, masters = zoo.make(name, dtype), {}
    for key, parameter in zoo.make(name, torch.float32).named_parameters():
        masters[key] = parameter.detach().clone()
    parameters = dict(model.named_parameters())
    trained = [key for key, parameter in parameters.items() if parameter.requires_grad]
    feedback = zero.error_feedback
    residuals = [{key: torch.zeros_like(masters[key]) if feedback else None for key in trained} for _ in range(world_size)]
    across = [{key: torch.zeros_like(masters[key]) if feedback else None for key in trained} for _ in range(world_size)]
    losses, norms = [], []
    for micros in zoo.micro_batches(STEPS, MICROS):
        tokens = sum(map(zoo.count_tokens, micros))
        total = {key: torch.zeros_like(masters[key]) for key in trained}
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(masters[key] if zero.gather_compression == "none" else rounded(masters[key]))
        loss_sum, used = 0.0, set()
        rounds = [[micros[rank::world_size]] for rank in range(world_size)]  # [rank][round]: micro-batches that are reduced together
        if zero.stage > 1:
            rounds = [[[ids] for ids in of_rank[0]] for of_rank in rounds]
        for number in range(len(rounds[0])):
            of_ranks = []
            for rank in range(world_size):
                grads = {key: torch.zeros_like(masters[key]) for key in trained}
                for ids in rounds[rank][number]:
                    model.zero_grad()
                    loss = model(ids)
                    loss.backward()
                    loss_sum += float(loss.detach())
                    for key in trained:
                        if parameters[key].grad is not None:
                            grads[key] += parameters[key].grad
                            used.add(key)
                of_ranks.append(grads)
            for key in trained:
                arrived = [sent(grads[key], zero.reduce_compression, kept[key]) for grads, kept in zip(of_ranks, residuals, strict=True)]
                if members := zero.secondary_shard_size:  # int8 inside a group, and of its sums int4 across
                    sums = [sum(arrived[first : first + members]) for first in range(0, world_size, members)]
                    arrived = [sent(one, "int4", kept[key]) for one, kept in zip(sums, across, strict=False)]
                total[key] += sum(arrived)
        norm = float(torch.cat([grad.flatten().double() for grad in total.values()]).norm()) / tokens
        factor = min(1.0, CLIP / (norm + 1e-6)) / tokens
        for key in used:
            masters[key] -= LR * factor * total[key]
        losses.append(loss_sum / tokens)
        norms.append(norm)
    return {"loss": losses, "norm": norms, "model": masters}


# ---- the engine
def train_sharded(name: str, zero: ZeroConfig, compute_dtype: str = "float32") -> dict:
    model = zoo.make(name, torch.float32)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=LR)
    engine = ZeroEngine(model, zero, PrecisionConfig(compute_dtype=compute_dtype), optimizer=optimizer, grad_clip=CLIP)
    trained = zoo.train(engine, zoo.micro_batches(STEPS, MICROS))
    whole = {name: tensor for name, tensor in engine.full_tensors() if tensor is not None}
    with engine.gathered():
        seen = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    assert engine.memory.by_kind.get("gathered", 0) == engine.memory.by_kind.get("gathering", 0) == 0
    return {**trained, "model": whole, "seen": seen}


def share_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of the elements. A rounding that falls between two codes may go either way, since kernels round a product and a sum at once."""
    equal = [(found[key].float() - expected[key]).abs() <= 2e-6 * expected[key].abs().clamp(min=0.1) for key in expected]
    return float(torch.cat([one.flatten().float() for one in equal]).mean())


def assert_follows(name: str, zero: ZeroConfig, results: list[dict], dtype: torch.dtype = torch.float32) -> None:
    emulated = train_emulated(name, zero, len(results), dtype)
    for result in results:
        assert result["loss"] == pytest.approx(emulated["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(emulated["norm"], rel=1e-5)
        assert all(torch.equal(result["seen"][key], tensor) for key, tensor in results[0]["seen"].items()), "ranks have the same parameters"
    assert share_equal(results[0]["model"], emulated["model"]) > 0.99


COMPRESSED = [
    ZeroConfig(stage=1, reduce_compression="bf16"),
    ZeroConfig(stage=3, reduce_compression="bf16"),
    ZeroConfig(stage=3, gather_compression="int8"),
    ZeroConfig(stage=1, reduce_compression="int8"),
    ZeroConfig(stage=2, reduce_compression="int8", error_feedback=True),
    ZeroConfig(stage=3, gather_compression="int8", reduce_compression="int8", error_feedback=True),
]


def shown(zero: ZeroConfig) -> str:
    return f"{zero.stage}-{zero.gather_compression}-{zero.reduce_compression}{'-feedback' if zero.error_feedback else ''}"


@pytest.mark.parametrize("zero", COMPRESSED, ids=shown)
def test_p45_training_is_that_of_the_same_rounding_in_one_process(ranks, zero: ZeroConfig) -> None:
    for name in ("Unused", "Branching" if zero.stage < 3 else "LowRank"):
        assert_follows(name, zero, ranks(2, train_sharded, name, zero))


def test_p45_so_it_is_on_four_ranks_and_with_parameters_in_bf16(ranks) -> None:
    assert_follows("Tied", COMPRESSED[-1], ranks(4, train_sharded, "Tied", COMPRESSED[-1]))
    assert_follows("Plain", COMPRESSED[-1], ranks(2, train_sharded, "Plain", COMPRESSED[-1], "bfloat16"), torch.bfloat16)


@pytest.mark.parametrize("feedback", [False, True])
def test_p45_so_it_is_with_sums_over_groups_of_groups(ranks, feedback: bool) -> None:
    """hpZ with qgZ of ZeRO++."""
    zero = ZeroConfig(stage=3, secondary_shard_size=2, reduce_compression="int8", error_feedback=feedback)
    assert_follows("Tied", zero, ranks(4, train_sharded, "Tied", zero))


def test_the_comparison_tells_rounding_from_none(ranks) -> None:
    results = ranks(2, train_sharded, "Plain", ZeroConfig(stage=3))
    for zero in COMPRESSED:
        assert share_equal(results[0]["model"], train_emulated("Plain", zero, 2)["model"]) < 0.9, zero


# ---- a step that fails, state that is kept, memory that is elsewhere
def make(zero: ZeroConfig, optimizer: type = torch.optim.SGD, seed: int = 1, **engine: object) -> ZeroEngine:
    model = zoo.make("Plain", torch.float32, seed)
    return ZeroEngine(model, zero, optimizer=optimizer(model.parameters(), lr=0.01), **engine)


def one_step(engine: ZeroEngine, seed: int, factor: float = 1.0) -> float:
    ids = zoo.micro_batches(1, 2, seed)[0][dist.get_rank()]
    engine.backward(engine.module(ids) * factor, zoo.count_tokens(ids))
    return float(engine.step().loss)


FEEDBACK = ZeroConfig(stage=3, gather_compression="int8", reduce_compression="int8", error_feedback=True)


def one_bad_gradient(zero: ZeroConfig, value: float) -> tuple[str, bool]:
    """In one element, on one rank; the losses are finite."""
    engine = make(zero)
    one_step(engine, 2)
    before = [buffer.master.clone() for buffer in engine.trained]
    spoiled = torch.zeros(29, zoo.WIDTH)
    spoiled[0, 5] = value
    if dist.get_rank() == 1:
        engine.module.blocks[1].up.weight.register_hook(lambda grad: grad + spoiled)
    try:
        one_step(engine, 3)
    except NonFiniteError as error:
        said = str(error)
    else:
        said = ""
    same = all(torch.equal(buffer.master, kept) for buffer, kept in zip(engine.trained, before, strict=True))
    forgotten = all(not residual.any() for buffer in engine.trained for residual in buffer.residuals)
    return said, same and forgotten


@pytest.mark.parametrize(
    ("zero", "value"),
    [
        (ZeroConfig(stage=1, reduce_compression="bf16"), float("inf")),
        (ZeroConfig(stage=2, reduce_compression="int8"), float("nan")),
        (FEEDBACK, float("-inf")),
    ],
)
def test_p48_a_gradient_that_is_not_finite_is_seen_behind_the_compression(ranks, zero: ZeroConfig, value: float) -> None:
    for said, unchanged in ranks(2, one_bad_gradient, zero, value):
        assert "the gradient is not finite in blocks.1.up.weight" in said and unchanged


def fp16_overflow() -> dict:
    precision = PrecisionConfig(compute_dtype="float16", loss_scale_window=2)
    engine = make(FEEDBACK, precision=precision)
    residuals = [residual for buffer in engine.trained for residual in buffer.residuals]
    one_step(engine, 2)
    kept = [residual.clone() for residual in residuals]
    one_step(engine, 3)  # the second good step: the scale doubles
    engine_scale = float(engine.scaler.scale)
    before = [buffer.master.clone() for buffer in engine.trained]
    one_step(engine, 4, 1e30 if dist.get_rank() else 1.0)  # finite in fp32, an overflow in fp16
    return {
        "left_over": sum(float(residual.abs().sum()) for residual in kept),
        "scales": (engine_scale, float(engine.scaler.scale)),
        "unchanged": all(torch.equal(buffer.master, kept) for buffer, kept in zip(engine.trained, before, strict=True)),
        "forgotten": not any(bool(residual.any()) for residual in residuals),
        "skipped": engine.skipped_steps,
    }


def test_p47_an_overflow_skips_the_step_and_forgets_what_was_left_over(ranks) -> None:
    for result in ranks(2, fp16_overflow):
        assert result["left_over"] > 0 and result["scales"] == (128.0, 64.0)
        assert result["unchanged"] and result["forgotten"] and result["skipped"] == 1


def scaled_and_not() -> tuple[list[float], list[float]]:
    """The same training under a scale that doubles on the way and without one."""
    losses = []
    for window in (1, 1000):
        engine = make(FEEDBACK, precision=PrecisionConfig(compute_dtype="float16", loss_scale_window=window))
        losses.append([one_step(engine, seed) for seed in (2, 3, 4)])
        largest = [float(residual.abs().max() / engine.scaler.scale) for buffer in engine.trained for residual in buffer.residuals]
        losses.append(largest)
    return losses


def test_what_was_left_over_follows_the_loss_scale(ranks) -> None:
    for doubling, left_doubling, fixed, left_fixed in ranks(2, scaled_and_not):
        assert doubling == pytest.approx(fixed, rel=1e-4)
        assert left_doubling == pytest.approx(left_fixed, rel=0.02)


def resumed() -> tuple[list[float], list[float], list[float]]:
    """Losses after a save, in the run that goes on, in one that takes the saved state, and in one that never saved."""
    through, saving = make(FEEDBACK, torch.optim.AdamW), make(FEEDBACK, torch.optim.AdamW)
    for engine in (through, saving):
        for seed in (2, 3):
            one_step(engine, seed)
    state = [saving.state_dict()]
    dist.broadcast_object_list(state, 0)
    other = make(FEEDBACK, torch.optim.AdamW, seed=7)
    one_step(other, 9)
    other.load_state_dict(state[0])
    return tuple([one_step(engine, seed) for seed in (4, 5, 6)] for engine in (saving, other, through))


def test_p16_a_run_that_was_saved_goes_on_as_one_that_is_resumed(ranks) -> None:
    for saving, other, through in ranks(2, resumed):
        assert saving == other != through


def blocks_and_masters(optimizer: type) -> float:
    engine = make(FEEDBACK, optimizer)
    for seed in (2, 3):
        one_step(engine, seed)
    wrong = 0
    for buffer in engine.trained:
        fresh = Blocks.zeros(buffer.shard_numel, torch.device("cpu"))
        fresh.fill(buffer.master)
        wrong += not (torch.equal(fresh.q, buffer.blocks.q) and torch.equal(fresh.scales, buffer.blocks.scales))
        assert buffer.shard is buffer.master, "no copy in the compute dtype besides"
    return wrong


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam], ids=lambda kind: kind.__name__)
def test_what_is_gathered_is_the_quantised_master_whoever_wrote_it(ranks, optimizer: type) -> None:
    """The kernel in its pass (AdamW, SGD), or we after torch's own optimizer (Adam)."""
    assert ranks(2, blocks_and_masters, optimizer) == [0, 0]


def parameters_and_masters() -> tuple[float, float]:
    """How far parameters of a matrix with moments in 8 bits are from their masters, and these from where they began; on rank 0."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    first = model.weight.detach().clone()
    engine = ZeroEngine(model, ZeroConfig(stage=3, gather_compression="int8"), optimizer=AdamW8bit(model.parameters(), lr=0.1))
    for step in range(2):
        torch.manual_seed(step)
        engine.backward(engine.module(torch.randn(4, 64)).square().sum(), 4)
        engine.step()
    masters = dict(engine.full_tensors())["weight"]
    with engine.gathered():
        seen = model.weight.detach().clone()
    return (0.0, 1.0) if masters is None else (float((seen - masters).abs().max()), float((masters - first).abs().min()))


def test_what_an_optimizer_without_blocks_has_updated_is_gathered_too(ranks) -> None:
    for rounding, step in ranks(2, parameters_and_masters):
        assert rounding < 0.5 / 127 and step > 0.01


def changed_by_hand(zero: ZeroConfig, offload: OffloadConfig) -> tuple[float, float, int]:
    """(what a changed element is on this rank at the next gather, and in the masters, how many other masters have changed)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    engine = ZeroEngine(model, zero, offload=offload, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: tensor for name, tensor in engine.full_tensors()}
    with engine.gathered(modify=True), torch.no_grad():
        model.weight[3, 5] = 7.0
    with engine.gathered():
        seen = float(model.weight.detach()[3, 5])
    after = {name: tensor for name, tensor in engine.full_tensors()}
    if dist.get_rank():
        return seen, 7.0, 0
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    return seen, float(after["weight"][3, 5]), changed - 1


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize(
    "zero",
    [ZeroConfig(stage=3, gather_compression="int8"), ZeroConfig(stage=3, shard_size=2, shard_optimizer="world")],
    ids=["int8", "in groups"],
)
def test_a_change_by_hand_reaches_every_rank_and_no_other_master(ranks, zero: ZeroConfig, offload: str) -> None:
    for seen, master, others in ranks(4, changed_by_hand, zero, OffloadConfig(optimizer=offload, params=offload)):
        assert (seen, master, others) == (7.0, 7.0, 0)


def losses_with(offload: OffloadConfig, precision: PrecisionConfig) -> list[float]:
    engine = make(ZeroConfig(stage=3, gather_compression="int8"), torch.optim.AdamW, precision=precision, offload=offload)
    return [one_step(engine, seed) for seed in (2, 3, 4)]


def test_parameters_in_host_memory_are_quantised_when_they_are_sent(ranks) -> None:
    plain = ranks(2, losses_with, OffloadConfig(), PrecisionConfig())[0]
    for offload in (OffloadConfig(optimizer="cpu"), OffloadConfig(params="cpu"), OffloadConfig(optimizer="cpu", params="cpu")):
        assert ranks(2, losses_with, offload, PrecisionConfig())[0] == plain
        close = ranks(2, losses_with, offload, PrecisionConfig(compute_dtype="bfloat16"))[0]  # of a bf16 copy, and not of the master
        assert close == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "dtype", "message"),
    [
        (ZeroConfig(stage=2, gather_compression="int8"), "float32", "gather_compression: int8 needs ZeRO stage 3"),
        (ZeroConfig(stage=0, reduce_compression="bf16"), "float32", "reduce_compression: bf16 needs ZeRO stage 1 or higher"),
        (ZeroConfig(stage=3, reduce_compression="int8"), "float64", "reduce_compression: got int8 with float64"),
        (ZeroConfig(stage=1, error_feedback=True), "float32", "error_feedback needs reduce_compression='int8'"),
    ],
)
def test_an_engine_refuses_what_it_cannot_honour(zero: ZeroConfig, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(zero, precision=PrecisionConfig(compute_dtype=dtype))


# ---- the exchanges alone
def values_of(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)) * 10.0 ** (rank - 1)


def exchanged(numel: int) -> dict[str, torch.Tensor]:
    """Every exchange on this rank's values; `numel` of a shard."""
    comm = Comm(dist.group.WORLD)
    shard, whole = values_of(comm.rank, numel), values_of(comm.rank, comm.size * numel)
    gathered = torch.zeros(comm.size * numel)
    Int8Gather(comm).all_gather(gathered, shard, 0).wait()
    results = {"gathered": gathered}
    for name, reducer in (("bf16", Bf16Reduce(comm)), ("int8", BlockReduce(comm))):
        for add in (False, True):
            results[f"{name} added" if add else name] = out = torch.ones(numel)
            reducer.reduce_scatter(whole, out, 4, add=add).wait()
        in_place = whole.clone()  # as stages 1 keeps gradients: the result is a part of what is reduced
        mine = in_place[comm.rank * numel : (comm.rank + 1) * numel]
        reducer.reduce_scatter(in_place, mine, 8, add=False).wait()
        assert torch.equal(mine, results[name])
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_is_the_sum_of_what_is_rounded(ranks, world_size: int) -> None:
    numel = 512
    everyones = [values_of(rank, world_size * numel) for rank in range(world_size)]
    for rank, found in enumerate(ranks(world_size, exchanged, numel)):
        gathered = torch.cat([rounded(values_of(owner, numel)) for owner in range(world_size)])
        assert torch.equal(found["gathered"], gathered)
        for how in ("bf16", "int8"):
            total = sum(sent(values, how) for values in everyones)[rank * numel : (rank + 1) * numel]
            torch.testing.assert_close(found[how], total, rtol=1e-6, atol=1e-6 * float(total.abs().max()))
            assert torch.equal(found[f"{how} added"], found[how] + 1)


def grid(inner_size: int, feedback: bool) -> tuple[list[torch.Tensor], int, int]:
    """Three reductions over nodes of `inner_size` ranks; this rank's sums, and bytes sent inside and across."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inners = [dist.new_group(list(range(first, first + inner_size))) for first in range(0, size, inner_size)]
    outers = [dist.new_group(list(range(local, size, inner_size))) for local in range(inner_size)]
    inner, outer = Comm(inners[rank // inner_size]), Comm(outers[rank % inner_size])
    numel = 512
    residuals = (torch.zeros(size * numel), torch.zeros(outer.size * numel)) if feedback else None
    reducer = HierarchicalReduce(inner, outer, residuals)
    sums = []
    for seed in range(3):
        out = torch.zeros(numel)
        reducer.reduce_scatter(values_of(rank, size * numel, seed), out, 0, add=False).wait()
        sums.append(out)
    return sums, inner.bytes_sent, outer.bytes_sent


@pytest.mark.parametrize("feedback", [False, True])
def test_a_sum_over_nodes_is_int8_inside_and_int4_across(ranks, feedback: bool) -> None:
    inner_size, size, numel = 2, 4, 512
    residuals = [torch.zeros(size * numel) if feedback else None for _ in range(size)]
    between = {(local, node): torch.zeros(2 * numel) if feedback else None for local, node in itertools.product(range(2), range(2))}
    found = ranks(size, grid, inner_size, feedback)
    for seed in range(3):
        arrived = [sent(values_of(rank, size * numel, seed), "int8", residuals[rank]).view(inner_size, 2, numel) for rank in range(size)]
        for local in range(inner_size):  # which rank of its node adds up chunk `local`, and sends the sums across
            across = []
            for node in range(2):
                inside = sum(arrived[rank][local] for rank in (2 * node, 2 * node + 1)).flatten()
                across.append(sent(inside, "int4", between[local, node]).view(2, numel))
            for node in range(2):
                total = sum(of_node[node] for of_node in across)
                mine = found[2 * node + local][0][seed]
                wrong = (mine - total).abs() > 1e-5 * total.abs().max()
                assert wrong.float().mean() < 0.01, "all but a code that falls between two"
    rows = 2 * numel * (1 + 4 / 64)
    assert {(inside, across) for _, inside, across in found} == {(3 * rows, 3 * numel * (1 / 2 + 4 / 64))}


def test_what_error_feedback_leaves_over_arrives_later(ranks) -> None:
    """The mean over many sums of the same values comes near to the exact sum only with it."""
    exact = sum(values_of(rank, 1024) for rank in range(2))
    off = [(torch.cat(ranks(2, mean_of_many, feedback)) - exact).abs().max() for feedback in (True, False)]
    assert off[0] < off[1] / 5


def mean_of_many(feedback: bool) -> torch.Tensor:
    comm = Comm(dist.group.WORLD)
    reducer, total = BlockReduce(comm, torch.zeros(1024) if feedback else None), torch.zeros(512)
    for _ in range(20):
        reducer.reduce_scatter(values_of(comm.rank, 1024), total, 0, add=True).wait()
    return total / 20
