"""Packs: every document of one is computed as if it were alone, by each of the ways in which attention over packs is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from framework import torch_private
from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, RopeScaling
from framework.models import documents
from framework.models.architecture import config_from_hf
from framework.models.llama import Llama
from tests.models import test_llama
from tests.models.families import FAMILIES, VOCABULARY, config_json, oracle

TINY = replace(test_llama.TINY, family="mistral")
LENGTHS = [[9, 4, 1, 16], [20, 3]]  # with a sliding window of 5: documents that are shorter, longer and as long as one token
TOKENS = 31  # so the first row has one token of padding, the second eight
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def some_pack(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (len(LENGTHS), TOKENS), generator=torch.Generator().manual_seed(seed))


def labels_of(ids: torch.Tensor, wanted: set[tuple[int, int]] | None = None) -> torch.Tensor:
    """Next tokens within each document; -100 at its last one, in padding and outside of the `wanted` (row, document)."""
    labels = torch.full_like(ids, -100)
    for row, document, start, stop in places():
        if wanted is None or (row, document) in wanted:
            labels[row, start : stop - 1] = ids[row, start + 1 : stop]
    return labels


def places() -> list[tuple[int, int, int, int]]:
    """(row, document, start, stop)"""
    return [(row, at, sum(lengths[:at]), sum(lengths[: at + 1])) for row, lengths in enumerate(LENGTHS) for at in range(len(lengths))]


def tiny(config: LlamaConfig = TINY, dtype: torch.dtype = torch.float32, **options) -> Llama:
    torch.manual_seed(0)
    return Llama(config, **options).to(dtype)


def assert_as_if_alone(model: Llama, ids: torch.Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        packed = model(ids, document_lengths=LENGTHS)
        for row, _, start, stop in places():
            alone = model(ids[row : row + 1, start:stop])
            torch.testing.assert_close(packed[row, start:stop], alone[0], atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["apart", "mask"])
def way(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way that runs on a CPU."""
    monkeypatch.setattr(documents, "attention_way", lambda *args, **options: request.param)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_p11_logits_of_a_pack_are_those_of_its_documents(family: str, way: str):
    model = Llama(config_from_hf(config_json(family), "config.json"))
    model.load_state_dict(oracle(family).state_dict())
    assert_as_if_alone(model, some_pack())


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_p11_for_every_window_and_number_of_key_heads(window: int | None, heads: int, way: str):
    assert_as_if_alone(tiny(replace(TINY, sliding_window=window, num_key_value_heads=heads), torch.float64), some_pack(), 1e-12)


def test_p11_dynamic_positions_of_a_document_follow_its_own_length(way: str):
    """Two documents are longer than the trained length of 8, by different factors, and two are not."""
    scaling = RopeScaling(kind="dynamic", factor=4.0)
    assert_as_if_alone(tiny(replace(TINY, max_position_embeddings=8, rope_scaling=scaling)), some_pack())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_p11_loss_and_gradients_of_a_pack_are_the_sum_over_its_documents(dtype: torch.dtype, tolerance: float, way: str):
    config = replace(TINY, sliding_window=5)
    ids, packed, apart = some_pack(), tiny(config, dtype), tiny(config, dtype)
    loss = packed(ids, labels_of(ids), document_lengths=LENGTHS)
    loss.backward()
    total = 0.0
    for row, _, start, stop in places():
        part = apart(ids[row : row + 1, start:stop], labels_of(ids)[row : row + 1, start:stop])
        part.backward()
        total += part.item()
    assert loss.item() == pytest.approx(total, rel=tolerance)
    for one, other in zip(packed.parameters(), apart.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= tolerance * other.grad.norm()


@pytest.mark.parametrize("window", [None, 5])
def test_p12_another_document_changes_not_a_bit_of_the_gradients(window: int | None, way: str):
    """Loss on one document of each row; all other tokens are replaced, before and behind it."""
    wanted = {(0, 1), (1, 1)}

    def gradients(ids: torch.Tensor) -> list[torch.Tensor]:
        model = tiny(replace(TINY, sliding_window=window, tie_word_embeddings=False))
        model(ids, labels_of(ids, wanted), document_lengths=LENGTHS).backward()
        embedding, *others = [parameter.grad for parameter in model.parameters()]
        read = {int(token) for row, at, start, stop in places() if (row, at) in wanted for token in ids[row, start:stop]}
        assert not embedding[[token for token in range(VOCABULARY) if token not in read]].any()
        return [embedding, *others]

    ids, other = some_pack(1), some_pack(2)
    for row, at, start, stop in places():
        if (row, at) in wanted:
            other[row, start:stop] = ids[row, start:stop]
    assert (ids != other).any()
    assert all(torch.equal(one, two) for one, two in zip(gradients(ids), gradients(other), strict=True))


def test_p13_positions_restart_in_every_document():
    device = torch.device("cpu")
    lengths = documents.filled([[3, 2], [1, 4]], rows=2, tokens=6)
    assert lengths == [[3, 2, 1], [1, 4, 1]]
    assert documents.positions(lengths, device).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 0]]
    assert documents.spread(lengths, device).tolist() == [[3, 3, 3, 2, 2, 1], [1, 4, 4, 4, 4, 1]]


def test_the_mask_is_the_one_drawn_in_the_docstring():
    mask = documents.document_mask([[3, 2, 1]], None, torch.device("cpu"))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("lengths", [[[3, 4]], [[3, 0], [1]], [[5, 2], [7]], [[-1, 3], [2]]])
def test_lengths_that_are_not_those_of_the_rows_are_refused(lengths: list):
    with pytest.raises(ValueError, match="document_lengths"):
        documents.filled(lengths, rows=2, tokens=6)


def test_a_pack_with_positions_of_the_callers_is_refused():
    with pytest.raises(ValueError, match="position_ids"):
        tiny()(some_pack(), document_lengths=LENGTHS, position_ids=torch.arange(TOKENS))


def test_p15_a_model_that_cannot_keep_documents_apart_is_refused():
    documents.require_isolation(tiny())
    with pytest.raises(UserError, match="Linear, which does not keep the documents of a pack apart") as caught:
        documents.require_isolation(torch.nn.Linear(2, 2))
    assert caught.value.problems[0].fix == "data.packing=false"


@pytest.mark.parametrize("compiled", [False, True])
def test_p15_half_precision_on_cuda_without_flash_attention_takes_the_mask(monkeypatch: pytest.MonkeyPatch, compiled: bool):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for flash, way in ((True, "varlen"), (False, "mask")):
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda flash=flash: flash)
        assert documents.attention_way("cuda", torch.bfloat16, 64, compiled=compiled) == way
    monkeypatch.undo()
    assert documents.attention_way("cuda", torch.float32, 64, compiled=compiled) == "mask"
    assert documents.attention_way("cpu", torch.bfloat16, 64, compiled=compiled) == ("mask" if compiled else "apart")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"compile_blocks": True}, {"activation_checkpointing": True, "compile_blocks": True}]
)
def test_checkpointing_and_compiling_do_not_change_gradients(window: int | None, options: dict, strict_compile: None):
    config, ids = replace(TINY, sliding_window=window), some_pack()
    plain, other = tiny(config, torch.float64), tiny(config, torch.float64, **options)
    for model in (plain, other):
        model(ids, labels_of(ids), document_lengths=LENGTHS).backward()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_one_mask_serves_all_blocks(packed: bool, way: str):
    """Torch would make an additive mask of one of bools, in every block, and keep each for backward."""
    masks = set()

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (TOKENS, TOKENS) or tensor.shape[-2:] == (20, 20):  # of a row, of the longest document
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        ids = some_pack()
        loss = tiny(replace(TINY, sliding_window=5))(ids, labels_of(ids), document_lengths=LENGTHS if packed else None)
    loss.backward()
    assert len(masks) == 1


def emulated_varlen(q, k, v, offsets, longest, window):
    """What `torch_private.varlen_attention` promises, in plain torch: the tokens of all rows as one, masked."""
    lengths = offsets.diff().tolist()
    assert offsets.dtype == torch.int32 and int(offsets[-1]) == len(q) and max(lengths) == longest
    mask = documents.document_mask([lengths], window, q.device)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def test_packs_run_on_the_meta_device():
    with torch.device("meta"):
        model, ids = tiny(activation_checkpointing=True), torch.empty(len(LENGTHS), TOKENS, dtype=torch.int64)
        model(ids, ids, trained_tokens=30, document_lengths=LENGTHS).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.library.custom_op("tests::varlen_attention", mutates_args=())
def opaque_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int, window: int | None
) -> torch.Tensor:
    """The same as one operation, as torch's own is for torch.compile."""
    return emulated_varlen(q, k, v, offsets, longest, window).contiguous()


opaque_varlen.register_fake(lambda q, k, v, offsets, longest, window: torch.empty_like(q))


@pytest.mark.parametrize("way", ["mask", "varlen"])
@pytest.mark.parametrize("window", [None, 5])
def test_all_blocks_and_packs_share_two_graphs(way: str, window: int | None, strict_compile: None, monkeypatch: pytest.MonkeyPatch):
    """One for the first micro-batch, one for every other, whatever the number of documents and their lengths."""
    monkeypatch.setattr(documents, "attention_way", lambda *args, compiled: way if compiled else "apart")
    monkeypatch.setattr(torch_private, "varlen_attention", opaque_varlen)
    torch._dynamo.utils.counters.clear()
    config = replace(TINY, sliding_window=window)
    plain, compiled = tiny(config), tiny(config, compile_blocks=True)
    for tokens, lengths in ((31, LENGTHS), (19, [[19], [3, 4]]), (29, [[7] * 4, [9, 20]]), (40, [[2] * 20, [30, 3]])):
        ids = torch.randint(0, VOCABULARY, (2, tokens))
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, document_lengths=lengths), plain(ids, document_lengths=lengths), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("window", [None, 5])
def test_p11_what_is_given_to_variable_length_attention_is_right(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """The kernel itself needs a GPU; here it is replaced by its definition."""
    monkeypatch.setattr(documents, "attention_way", lambda *args, **options: "varlen")
    monkeypatch.setattr(torch_private, "varlen_attention", emulated_varlen)
    assert_as_if_alone(tiny(replace(TINY, sliding_window=window)), some_pack())


def test_variable_length_attention_is_torchs_with_the_token_itself_in_the_window(monkeypatch: pytest.MonkeyPatch):
    from torch.nn.attention import varlen

    calls = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args, window_size, enable_gqa: calls.append((args[5:], window_size, enable_gqa)) or args[0]
    )
    q, k, offsets = torch.zeros(7, 4, 8), torch.zeros(7, 2, 8), torch.tensor([0, 4, 7], dtype=torch.int32)
    for window in (None, 1, 5):
        torch_private.varlen_attention(q, k, k, offsets, 4, window)
    assert calls == [((4, 4), (-1, 0), True), ((4, 4), (0, 0), True), ((4, 4), (4, 0), True)]


@ON_GPU
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float32, 1e-4)])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"compile_blocks": True}])
def test_p11_on_a_gpu_a_pack_is_computed_as_on_the_cpu(window: int | None, dtype: torch.dtype, tolerance: float, options: dict):
    config, ids = replace(TINY, sliding_window=window, max_position_embeddings=64), some_pack()
    labels, here, there = labels_of(ids), tiny(config, dtype), tiny(config, dtype, **options).cuda()
    loss = here(ids, labels, document_lengths=LENGTHS)
    loss.backward()
    loss_there = there(ids.cuda(), labels.cuda(), document_lengths=LENGTHS)
    loss_there.backward()
    assert loss_there.item() == pytest.approx(loss.item(), rel=tolerance)
    for one, two in zip(here.parameters(), there.parameters(), strict=True):
        assert (two.grad.cpu().float() - one.grad.float()).norm() <= tolerance * one.grad.float().norm()
