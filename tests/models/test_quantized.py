"""Quantised layers against plain torch on the matrix that they stand for, and the same bytes for every way of reading them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from framework.config.schema import LlamaConfig, PeftConfig, ZeroConfig
from framework.kernels.nf4 import nf4_dequantize_reference, nf4_quantize
from framework.kernels.quantize import dequantize_reference, quantize_reference
from framework.models import quantized
from framework.models.llama import Llama
from framework.models.lora import AdapterReader, LoraLinear, QuantizedLoraLinear, add_adapter, row_norms
from framework.models.pretrained import load_weights, open_pretrained, write_pretrained
from framework.models.quantized import QuantizedLinear, QuantizedReader
from framework.models.targets import quantized_names
from framework.zero import ZeroEngine

ARCHITECTURE = LlamaConfig(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_bias=True,
    family="qwen2",
)
IDS = torch.arange(2 * 9).view(2, 9) * 7 % ARCHITECTURE.vocab_size
NF4 = PeftConfig(method="lora", rank=3, alpha=5.0, base="nf4")
INT8 = dataclasses.replace(NF4, base="int8", base_block=32)
FORMATS = [NF4, INT8]
NAMES = ["nf4", "int8"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("base") / "model"
    return write_pretrained(folder, ARCHITECTURE, Llama(ARCHITECTURE).named_parameters(), dtype="bfloat16", show=False)


def layer(config: PeftConfig, inputs: int = 24, outputs: int = 10, kind: type[QuantizedLinear] = QuantizedLinear) -> QuantizedLinear:
    torch.manual_seed(0)
    made = kind(inputs, outputs, config, bias=True)
    made.quantize_(torch.randn(outputs, inputs))
    torch.nn.init.normal_(made.bias)
    return made


def stood_for(weight: torch.Tensor, config: PeftConfig) -> torch.Tensor:
    """The matrix that is left of `weight`, by the references of the kernels."""
    flat, block = weight.float().flatten(), config.base_block
    if config.base == "nf4":
        return nf4_dequantize_reference(*nf4_quantize(flat, block=block), flat.numel(), block=block).view(weight.shape)
    return dequantize_reference(*quantize_reference(flat, block=block), flat.numel(), block=block).view(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", FORMATS, ids=NAMES)
def test_a_layer_and_its_gradient_are_those_of_the_matrix_that_it_stands_for(config: PeftConfig, dtype: torch.dtype):
    torch.manual_seed(0)
    weight = torch.randn(10, 24)
    made = layer(config).to(dtype)
    matrix = stood_for(weight, config).to(dtype)
    assert torch.equal(made.dense(dtype), matrix) and made.weight_codes.dtype is made.weight_scales.dtype is torch.uint8
    x, y = (torch.randn(2, 3, 24).to(dtype).requires_grad_() for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    found, expected = made(x), linear(y, matrix, made.bias)
    gradient = torch.randn(2, 3, 10).to(dtype)
    found.backward(gradient)
    expected.backward(gradient)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(x.grad, y.grad, **tolerance)
    assert all(parameter.grad is None for parameter in made.parameters())


@pytest.mark.parametrize(("config", "bits"), [(NF4, 4.5), (dataclasses.replace(NF4, base_block=256), 4.125), (INT8, 9)])
def test_bits_of_a_weight(config: PeftConfig, bits: float):
    made = layer(config, 64, 32)
    assert 8 * (made.weight_codes.nbytes + made.weight_scales.nbytes) / (64 * 32) == bits


@pytest.mark.parametrize("dora", [False, True])
def test_no_dequantised_weight_is_kept_for_backward_and_gradients_are_those_of_the_dense_one(dora: bool):
    made = layer(dataclasses.replace(NF4, dora=dora), 128, 96, kind=QuantizedLoraLinear)
    trained = [parameter for parameter in (made.lora_A, made.lora_B, made.lora_magnitude) if parameter is not None]
    for parameter in trained:
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 128, requires_grad=True)
    saved: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.setdefault(id(tensor), tensor), lambda tensor: tensor):
        out = made(x)
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved.values()}
    parameters = sum(parameter.nbytes for parameter in made.parameters())
    assert sum(kept.values()) < parameters + 16 * 128 * 4 < made.dense(torch.float32).nbytes
    gradient = torch.randn(2, 96)
    found = torch.autograd.grad(out, (x, *trained), gradient)
    matrix = made.dense(torch.float32) + NF4.alpha / NF4.rank * made.lora_B @ made.lora_A
    if dora:
        matrix = matrix * (made.lora_magnitude / row_norms(matrix).detach())[:, None]
    expected = torch.autograd.grad(linear(x, matrix, made.bias), (x, *trained), gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", FORMATS, ids=NAMES)
@pytest.mark.parametrize("elements_at_once", [1 << 22, 256])
def test_the_bytes_are_the_same_for_every_split_into_ranges(monkeypatch, config: PeftConfig, elements_at_once: int):
    monkeypatch.setattr(quantized, "ELEMENTS_AT_ONCE", elements_at_once)
    outputs, inputs = 25, 27  # an odd number of elements, and no block ends with a row
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    asked: list[tuple[int, int]] = []

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return weight.flatten()[start:stop] if name == "q.weight" else torch.zeros(stop - start)

    reader, made = QuantizedReader(read, {"q": (outputs, inputs)}, config), QuantizedLinear(inputs, outputs, config, bias=False)
    made.quantize_(weight)
    for name, whole in (("q.weight_codes", made.weight_codes), ("q.weight_scales", made.weight_scales)):
        size = whole.numel()
        for cuts in ((0, size), (0, 1, size), (0, 5, 6, 32, 33, size - 1, size), (0, size // 2, size // 2, size)):
            ranges = zip(cuts, cuts[1:], strict=False)
            assert torch.equal(torch.cat([reader.read(name, start, stop) for start, stop in ranges]), whole)
    matrix = made.dense(torch.float32).flatten()
    assert torch.equal(torch.cat([reader.dequantized("q", 0, 100), reader.dequantized("q", 100, matrix.numel())]), matrix)
    assert reader.dequantized("q", 30, 30).numel() == 0 and reader.read("other.weight", 2, 5).tolist() == [0, 0, 0]
    asked.clear()
    reader.read("q.weight_codes", 256 if config is INT8 else 128, 512 if config is INT8 else 256)
    assert (asked[0][0], asked[-1][1]) == (256, 512), "what lies in the blocks that were asked for, and no more"


def codes_in_an_engine(base, config: PeftConfig, stage: int) -> dict[str, torch.Tensor]:
    """All parameters of an engine that a reader has filled."""
    pretrained = open_pretrained(base)
    with torch.device("meta"):
        model = Llama(ARCHITECTURE)
    add_adapter(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = ZeroEngine(
        model, ZeroConfig(stage=stage), optimizer=torch.optim.AdamW(trained), read=AdapterReader(pretrained, config, 3).read
    )
    assert all(buffer.layout.integer is torch.uint8 for buffer in engine.buffers if "codes" in buffer.layout.slots[0].name)
    return {name: tensor for name, tensor in engine.full_tensors() if dist.get_rank() == 0}


@pytest.mark.parametrize(
    "config", [NF4, dataclasses.replace(INT8, dora=True, targets=["v_proj"], quantized_layers="all-linear")], ids=NAMES
)
def test_every_stage_and_number_of_ranks_holds_the_same_bits(ranks, base, config: PeftConfig):
    model = Llama(ARCHITECTURE)
    load_weights(model, open_pretrained(base), show=False)
    add_adapter(model, config)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for world_size, stage in ((1, 0), (2, 1), (2, 3), (4, 3)):
        found = ranks(world_size, codes_in_an_engine, base, config, stage)[0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected if "lora_A" not in name)


def test_which_layers_are_quantised(base):
    targets = dataclasses.replace(NF4, targets=["q_proj", "v_proj"])
    for config, quantised in ((targets, 4), (dataclasses.replace(targets, quantized_layers="all-linear"), 14)):
        with torch.device("meta"):
            model = Llama(ARCHITECTURE)
        add_adapter(model, config)
        kinds = [type(module) for module in model.modules()]
        assert len(quantized_names(ARCHITECTURE, config)) == quantised
        assert (kinds.count(QuantizedLoraLinear), kinds.count(QuantizedLinear), kinds.count(LoraLinear)) == (4, quantised - 4, 0)
        assert model.lm_head.weight.is_floating_point() and model.model.embed_tokens.weight.is_floating_point()


@pytest.mark.parametrize("config", [*FORMATS, dataclasses.replace(NF4, dora=True)], ids=[*NAMES, "dora"])
def test_a_new_adapter_changes_nothing_and_trains_as_on_the_dequantised_model(base, config: PeftConfig):
    """Also under activation checkpointing, which recomputes."""
    pretrained = open_pretrained(base)
    ours, plain = Llama(ARCHITECTURE, activation_checkpointing=True), Llama(ARCHITECTURE)
    for model in (ours, plain):
        load_weights(model, pretrained, show=False)
    for name in quantized_names(ARCHITECTURE, config):
        weight = plain.get_submodule(name).weight
        weight.data = stood_for(weight, config)
    original = plain(IDS).detach()
    add_adapter(ours, config)
    add_adapter(plain, dataclasses.replace(config, base="float"))
    torch.testing.assert_close(ours(IDS).detach(), original, rtol=1e-5, atol=1e-6)
    torch.manual_seed(5)
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            other = plain.get_parameter(name)
            if "magnitude" in name:
                torch.testing.assert_close(parameter, row_norms(plain.get_submodule(name.rpartition(".")[0]).weight))
            parameter.data = torch.rand(parameter.shape)
            other.data = parameter.data.clone()
    labels = IDS.roll(-1)
    losses = [model(IDS, labels) for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_compiled_block_has_no_graph_break(strict_compile, base):
    eager, compiled = Llama(ARCHITECTURE), Llama(ARCHITECTURE, compile_blocks=True)
    for model in (eager, compiled):
        load_weights(model, open_pretrained(base), show=False)
        add_adapter(model, NF4)
    compiled.load_state_dict(eager.state_dict())
    labels = IDS.roll(-1)
    losses = [model(IDS, labels) for model in (eager, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    name = "model.layers.0.self_attn.q_proj.lora_B"
    torch.testing.assert_close(eager.get_parameter(name).grad, compiled.get_parameter(name).grad)
