"""Checkpoints of DeepSpeed: equal to what its own conversion gives, read by range, described by name, and refused where they are others."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from framework.checkpoint.deepspeed import DeepSpeedWeights
from framework.checkpoint.open import open_model
from framework.checkpoint.source import check_source, find_source
from framework.cli import checkpoint as command
from framework.config.errors import UserError
from framework.models.architecture import config_from_hf
from tests.checkpoint.deepspeed_files import TAG, write_deepspeed
from tests.models.families import byte_tokenizer, config_json, oracle


def masters(family: str) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in oracle(family).named_parameters()}


def as_groups(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Matrices and the rest, as weight decay divides them."""
    return [{name: tensor for name, tensor in tensors.items() if (tensor.dim() > 1) == matrices} for matrices in (True, False)]


def described(folder: Path, family: str) -> Path:
    """With a configuration and a tokenizer beside it."""
    (folder / "config.json").write_text(json.dumps(config_json(family)))
    byte_tokenizer().save_pretrained(folder)
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_model(str(path))
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_range_of_every_parameter_is_what_was_written(tmp_path: Path, stage: int, world_size: int):
    tensors = masters("llama2")
    frozen = {name: tensors.pop(name) for name in list(tensors) if ".layers.0." in name}
    folder = write_deepspeed(tmp_path / "ds", as_groups(tensors), stage=stage, world_size=world_size, frozen=frozen)
    weights = DeepSpeedWeights(folder / TAG)
    tensors |= {name: tensor.bfloat16() for name, tensor in frozen.items()}
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name, 0, tensor.numel()).view(tensor.shape), tensor), name
        for start, stop in (
            (0, 1),
            (5, 17),
            (tensor.numel() // 2 - 2, tensor.numel() // 2 + 3),
            (tensor.numel() - 3, tensor.numel()),
            (7, 7),
        ):
            assert torch.equal(weights.read(name, start, stop), tensor.flatten()[start:stop]), (name, start, stop)
    assert weights.describe() == f"DeepSpeed 0.19.8, ZeRO stage {stage}, {world_size} ranks, step 2"


@pytest.mark.parametrize("path", ["ds", f"ds/{TAG}"])
def test_it_opens_as_a_model_with_what_lies_beside_it(tmp_path: Path, path: str):
    tensors = masters("smollm")  # tied
    folder = tmp_path / "ds"
    write_deepspeed(folder, as_groups(tensors), stage=3, world_size=2, shared={"lm_head.weight": "model.embed_tokens.weight"})
    described(folder, "smollm")
    assert check_source(str(tmp_path / path)) == []
    model = open_model(str(tmp_path / path))
    assert model.config == config_from_hf(config_json("smollm"), "") and model.tokenizer.tokenizer == str(folder)
    assert model.names() == {name: tensor.shape for name, tensor in tensors.items()}
    assert all(torch.equal(model.read(name, 0, tensor.numel()), tensor.flatten()) for name, tensor in tensors.items())


@pytest.mark.parametrize("prefix", ["module.", "_forward_module.model.", "model._orig_mod."])
def test_wrappers_are_taken_off_the_names(tmp_path: Path, prefix: str):
    tensors = masters("llama2")
    wrapped = [{f"{prefix}{name}": tensor for name, tensor in group.items()} for group in as_groups(tensors)]
    model = open_model(str(described(write_deepspeed(tmp_path / "ds", wrapped, stage=2, world_size=2), "llama2")))
    assert all(torch.equal(model.read(name, 0, tensor.numel()), tensor.flatten()) for name, tensor in tensors.items())


def test_what_is_missing_beside_it_is_said_with_what_to_write(tmp_path: Path):
    folder = write_deepspeed(tmp_path / "ds", as_groups(masters("llama2")), stage=2, world_size=2)
    config, tokenizer = (str(problem) for problem in check_source(str(folder)))
    assert "weights without a config.json" in config and "model.arch" in config
    assert "weights without a tokenizer" in tokenizer and "model.tokenizer=" in tokenizer
    assert check_source(str(folder), has_tokenizer=True, has_architecture=True) == []
    arch = config_from_hf(config_json("llama2"), "")
    assert open_model(str(folder), arch=arch).config == arch
    described(folder, "llama2")
    (both,) = check_source(str(folder), has_architecture=True)
    assert (both.path, both.fix) == ("model.arch", "model.arch=null  (or model.path=null)")


def test_another_architecture_is_refused_by_tensor(tmp_path: Path):
    folder = described(write_deepspeed(tmp_path / "ds", as_groups(masters("llama2")), stage=2, world_size=2), "llama3")
    assert "model.layers.0.self_attn.k_proj.weight of shape [48, 48]" in refusal(folder)


# ---- what goes wrong
@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return described(write_deepspeed(tmp_path / "ds", as_groups(masters("llama2")), stage=3, world_size=2), "llama2")


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_01-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "a mixture of experts"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_by_name(whole: Path, renamed: str, said: str):
    shutil.copy(next((whole / TAG).glob("*model_states.pt")), whole / TAG / renamed)
    assert said in refusal(whole) and renamed in refusal(whole)


def test_stage_0_which_writes_no_masters_is_refused(whole: Path):
    for file in (whole / TAG).glob("*optim_states.pt"):
        file.unlink()
    assert "which ZeRO stage 0 does not write" in refusal(whole)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_the_files_of_a_missing_rank_are_missed(whole: Path, kind: str):
    next((whole / TAG).glob(f"*rank_1*{kind}_states.pt")).unlink()
    assert f"1 files *_{kind}_states.pt" in refusal(whole) and "expected 2" in refusal(whole)


def test_a_missing_description_is_named(tmp_path: Path):
    folder = write_deepspeed(tmp_path / "ds", as_groups(masters("llama2")), stage=2, world_size=2)
    shutil.copytree(folder / TAG, tmp_path / TAG)
    (tmp_path / TAG / "mp_rank_00_model_states.pt").unlink()
    assert "mp_rank_00_model_states.pt" in refusal(described(tmp_path / TAG, "llama2"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_off_file_is_named(whole: Path, share: float):
    file = next((whole / TAG).glob("*rank_1*optim_states.pt"))
    with file.open("r+b") as stream:
        stream.truncate(round(share * file.stat().st_size))
    assert str(file) in refusal(whole) and "damaged" in refusal(whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_stage", None),
        ("zero_stage", "x"),
        ("zero_stage", 7),
        ("partition_count", []),
        ("partition_count", None),
        ("fp32_flat_groups", 3),
        ("fp32_flat_groups", [torch.tensor(1.0)]),
    ],
)
def test_a_malformed_description_is_an_error_and_no_traceback(whole: Path, key: str, value):
    file = sorted((whole / TAG).glob("*optim_states.pt"))[0]
    state = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.ones(3)]} | {key: value}
    torch.save({"optimizer_state_dict": state}, file)
    assert str(whole / TAG) in refusal(whole)


@pytest.mark.parametrize("content", [[1], {"param_shapes": 3}, {"param_shapes": [{"a": "b"}]}, {"param_shapes": [{3: (1,)}]}, None])
def test_malformed_model_states_are_an_error_and_no_traceback(whole: Path, content):
    for file in (whole / TAG).glob("*model_states.pt"):
        torch.save(content, file)
    assert str(whole / TAG) in refusal(whole)


def test_verify_compares_the_checksums_of_every_file(whole: Path, capsys):
    assert command.main(["verify", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "every element of which can be read" in said and "CRC-32 as it was written over" in said and "NOT checked" not in said
    file = sorted((whole / TAG).glob("*optim_states.pt"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert command.main(["verify", str(whole)]) == 2
    assert f"{file}: got changed bytes in " in capsys.readouterr().err


def test_what_transformers_has_written_beside_the_tag_goes_before_it(whole: Path):
    assert find_source(str(whole)).kind == "deepspeed"
    (whole / "model.safetensors").touch()
    assert find_source(str(whole)).kind == "model" and find_source(str(whole / TAG)).kind == "deepspeed"
    (whole / "config.json").unlink()
    (whole / "adapter_config.json").touch()
    assert find_source(str(whole)).kind == "model"


def test_latest_that_names_nothing_is_told(whole: Path):
    (whole / "latest").write_text("global_step9")
    assert "whose file latest names global_step9" in str(check_source(str(whole))[0])


class Nasty:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_function_in_a_pickle_is_refused_by_name_and_never_called(whole: Path, kind: str, monkeypatch):
    monkeypatch.chdir(whole)
    file = next((whole / TAG).glob(f"*rank_1*{kind}_states.pt"))
    torch.save({"optimizer_state_dict": {"x": Nasty()}}, file)
    said = refusal(whole)
    assert str(file) in said and f"{os.mkdir.__module__}.mkdir" in said and "zero_to_fp32.py" in said
    assert not Path("made_by_a_pickle").exists()


# ---- against DeepSpeed itself
TRAIN = """
import sys, torch, deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
stage, dtype, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM(config)
settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
ids = torch.arange(8)[None]
engine.backward(engine(input_ids=ids, labels=ids).loss)
engine.step()
engine.save_checkpoint(folder)
torch.distributed.barrier()
if torch.distributed.get_rank() == 0:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    torch.save({name: tensor.clone() for name, tensor in get_fp32_state_dict_from_zero_checkpoint(folder).items()}, folder + "/fp32.pt")
"""


def python_with_deepspeed() -> str:
    python = os.environ.get("FRAMEWORK_TEST_DEEPSPEED_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; FRAMEWORK_TEST_DEEPSPEED_PYTHON may name an interpreter that has it")
    return python


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_a_checkpoint_of_deepspeed_reads_as_its_own_conversion_does(tmp_path: Path, stage: int, dtype: str):
    python = python_with_deepspeed()
    (tmp_path / "train.py").write_text(TRAIN)
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = subprocess.run([*launch, str(stage), dtype, str(tmp_path / "ds")], capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = DeepSpeedWeights(find_source(str(tmp_path / "ds")).folder)
    expected = torch.load(tmp_path / "ds" / "fp32.pt", weights_only=True)
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert all(torch.equal(weights.read(name, 0, tensor.numel()), tensor.flatten()) for name, tensor in expected.items())
