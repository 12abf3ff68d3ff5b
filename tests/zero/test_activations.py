"""Inputs of recomputed blocks kept elsewhere than on the device: no bit changes, and bytes and order are those that were planned."""

from __future__ import annotations

import gc
from functools import partial
from unittest.mock import patch

import pytest
import torch

from framework import torch_private
from framework.models.activations import activation_bytes
from framework.zero import ZeroConfig, ZeroEngine
from framework.zero.activations import HostActivations
from tests.models.test_activations import PACKS, ROWS, TOKENS, make


class Parts:
    """Each rank keeps its part of an input, as tensor-parallel ranks with the same activations may."""

    def __init__(self, inner: HostActivations | None) -> None:
        self.inner = inner

    def pack(self, x: torch.Tensor):
        if not x.numel():
            return None, x
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        part = x.flatten().chunk(size)[rank].clone()
        return x.shape, part if self.inner is None else self.inner.pack(part)

    def unpack(self, kept) -> torch.Tensor:
        shape, part = kept
        if shape is None:
            return part
        part = part if self.inner is None else self.inner.unpack(part)
        whole = part.new_empty(part.numel() * torch.distributed.get_world_size())
        torch_private.all_gather_single(whole, part)
        return whole.view(shape)


def train(stage: int, kind: str, saver: str | None, options: dict, packs: list | None, device: str = "cpu") -> tuple[list, dict]:
    """Two accumulated steps; every rank computes the same."""
    with patch.object(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True)):  # without generating code
        model = make(kind, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = ZeroEngine(model, ZeroConfig(stage=stage), optimizer=optimizer, device=device)
    host = HostActivations(engine)
    model.model.input_saver = {None: None, "host": host, "parts": Parts(None), "parts on host": Parts(host)}[saver]
    generator, results = torch.Generator().manual_seed(1), []
    for _ in range(2):
        for last in (False, True):
            ids = torch.randint(0, 64, (ROWS, TOKENS), generator=generator).to(device)
            engine.backward(model(ids, ids, document_lengths=packs), ids.numel(), last=last)
        stats = engine.step()
        results += [float(stats.loss), float(stats.grad_norm)]
    gc.collect()
    meters = {"host": engine.host_memory.peak, "left": engine.host_memory.current, "device": engine.memory.by_kind.get("activations", 0)}
    return results, meters


def train_each(cases: list[tuple[int, str | None]], kind: str, options: dict, packs: list | None) -> list[tuple[list, dict]]:
    return [train(stage, kind, saver, options, packs) for stage, saver in cases]


@pytest.mark.parametrize(("kind", "packs"), [("all", None), ("adapters", PACKS)], ids=["whole model", "adapters, packed"])
def test_inputs_on_the_host_or_in_parts_change_no_bit(ranks, kind: str, packs: list | None) -> None:
    """And the host's bytes are those of the plan, freed after each backward."""
    cases = [(3, None), (3, "host"), (3, "parts"), (3, "parts on host"), (1, None), (1, "host")]
    trained = ranks(2, train_each, cases, kind, {"activation_checkpointing": True}, packs, timeout=240)[0]  # they import torch._dynamo
    by_case = dict(zip(cases, trained, strict=True))
    on_host = activation_bytes(make(kind), ROWS, TOKENS, torch.float32, "cpu", "apart" if packs else None).on_host(range(3))
    for (stage, saver), (results, meters) in by_case.items():
        assert results == by_case[stage, None][0], (stage, saver)
        assert meters["left"] == 0 and meters["device"] == 0
        assert meters["host"] == {None: 0, "host": on_host, "parts": 0, "parts on host": on_host // 2}[saver]


def test_compiled_blocks_of_which_every_other_one_is_recomputed_change_no_bit_either() -> None:
    chosen = (0, 2)
    options = {"activation_checkpointing": chosen, "compile_blocks": True}
    expected, _ = train(3, "all", None, options, None)
    results, meters = train(3, "all", "host", options, None)
    assert results == expected
    assert meters["host"] == activation_bytes(make("all"), ROWS, TOKENS, torch.float32, "cpu", None).on_host(chosen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_to_and_from_pinned_memory_change_no_bit() -> None:
    options = {"activation_checkpointing": True}
    expected, _ = train(3, "all", None, options, None, "cuda")
    results, meters = train(3, "all", "host", options, None, "cuda")
    assert results == expected and meters["left"] == 0 and meters["device"] == 0


def test_an_input_is_fetched_one_block_before_it_is_needed_and_parameters_stay() -> None:
    model = make("all")
    engine = ZeroEngine(model, ZeroConfig(stage=3))
    host, inputs = HostActivations(engine), [torch.randn(3, 4) for _ in range(3)]
    kept = [host.pack(x) for x in inputs]
    assert engine.host_memory.by_kind["activations"] == 3 * 48
    for index in (2, 1, 0):
        got = host.unpack(kept.pop())
        assert torch.equal(got, inputs[index]) and got.data_ptr() != inputs[index].data_ptr()
        assert engine.memory.by_kind["activations"] == (48 if index else 0)
        assert engine.host_memory.by_kind["activations"] == 48 * index
    with engine.gathered():
        parameter = model.lm_head.weight
        assert host.pack(parameter) is parameter and host.unpack(parameter) is parameter
