"""From checkpoints to folders for others and back: to the bit, under any stage and number of ranks, in the memory of one tensor."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.checkpoint.folder import sealed, step_folder, unsealed
from framework.checkpoint.open import open_model
from framework.checkpoint.source import check_source, find_source
from framework.cli import export, generate
from framework.config.errors import UserError
from framework.config.schema import LlamaConfig, ModelConfig
from framework.models.generate import load_for_generation
from framework.models.llama import Llama
from framework.models.pretrained import write_pretrained
from framework.models.safetensors_io import read_header
from tests.checkpoint.saved_models import STOP, checkpoint_of, hugging_face, masters_of
from tests.models.families import byte_tokenizer, oracle, some_ids


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return hugging_face("smollm", tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def run(ranks, source, tmp_path_factory) -> Path:
    """A run with one checkpoint, of stage 3 and 3 ranks."""
    run_dir = tmp_path_factory.mktemp("run")
    ranks(3, checkpoint_of, source, step_folder(run_dir, 0), 3, timeout=120)
    return run_dir


def same_bits(one: Path, other: Path) -> bool:
    first, second = open_model(str(one)), open_model(str(other))
    read = [{name: model.read(name, 0, shape.numel()) for name, shape in model.names().items()} for model in (first, second)]
    return (
        first.config == second.config
        and read[0].keys() == read[1].keys()
        and all(torch.equal(read[0][name], read[1][name]) for name in read[0])
    )


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (3, 1)])
def test_hugging_face_to_ours_and_back_is_bitwise(ranks, source, tmp_path, stage, world_size):
    folder = step_folder(tmp_path, 0)
    ranks(world_size, checkpoint_of, source, folder, stage)
    assert export.main([str(folder), str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    assert same_bits(source, tmp_path / "back")


def test_transformers_loads_the_export_of_a_checkpoint_with_equal_logits(run, tmp_path):
    for options, files in ((["--max-shard-size", "100KB"], 3), ([], 1)):
        out = tmp_path / f"{files}"
        assert export.main([str(step_folder(run, 0)), str(out), "--dtype", "float32", *options]) == 0
        assert len(list(out.glob("*.safetensors"))) >= files
        theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
        with torch.no_grad():
            assert torch.equal(theirs(some_ids()).logits, oracle("smollm")(some_ids()).logits)


def test_p10_the_export_stops_where_training_ended_answers_and_keeps_tokenizer_and_template(source, run, tmp_path):
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    tokenizer = byte_tokenizer()
    listed, of_source = (json.loads((path / "generation_config.json").read_text())["eos_token_id"] for path in (tmp_path / "out", source))
    assert set(listed) == {of_source, STOP, *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])}
    for path in (run, tmp_path / "out"):
        _, loaded, stops = load_for_generation(open_model(str(path)), show=False)
        assert loaded.chat_template == tokenizer.chat_template and STOP in stops
    assert {entry.dtype for entry in read_header(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_checkpoint_answers_as_its_export_does(run, tmp_path, capsys):
    assert export.main([str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    answers = []
    for path in (run, step_folder(run, 0), tmp_path / "out"):
        assert generate.main(["--model", str(path), "Hello", "--max-new-tokens", "8"]) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 1


def test_another_tokenizer_may_be_named(run, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert export.main([str(run), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert "{{ messages }}" in (tmp_path / "out" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_training_starts_from_the_masters_of_a_checkpoint(ranks, run, stage):
    found = ranks(2, masters_of, run, stage)[0]
    assert found.keys() == dict(oracle("smollm").named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in oracle("smollm").named_parameters())


def test_a_run_is_its_export_or_else_its_newest_whole_checkpoint(ranks, source, tmp_path):
    for step in (2, 10):
        ranks(1, checkpoint_of, source, step_folder(tmp_path, step), 0)
    assert find_source(str(tmp_path)).folder == step_folder(tmp_path, 10) == find_source(str(tmp_path / "checkpoints")).folder
    (step_folder(tmp_path, 10) / "rank_0.json").unlink()
    assert find_source(str(tmp_path)).folder == step_folder(tmp_path, 2)
    (step_folder(tmp_path, 2) / "rank_0.json").unlink()
    (problem,) = check_source(str(tmp_path), "MODEL")
    assert problem.path == "MODEL" and "step_2: no rank_0.json; step_10: no rank_0.json" in problem.got
    (tmp_path / "export").mkdir()
    assert find_source(str(tmp_path)).path == str(tmp_path / "export")


def test_weights_bring_their_architecture(source, run):
    for path in (source, run):
        (problem,) = check_source(str(path), has_architecture=True)
        assert (problem.path, problem.fix) == ("model.arch", "model.arch=null  (or model.path=null)")


def test_a_checkpoint_of_no_recipe_says_what_it_lacks(ranks, run):
    index = step_folder(run, 0) / "index.json"
    whole = index.read_text()
    index.write_text(sealed({**unsealed(whole), "run": {}}))
    try:
        with pytest.raises(UserError, match="no architecture, recipe, export, frozen in .*index.json"):
            open_model(str(run))
    finally:
        index.write_text(whole)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-shard-size", "5"], "--max-shard-size 5GB"),
        (["--max-shard-size", "0GB"], "a number above 0"),
        (["--format", "dcp", "--max-shard-size", "5GB"], "one of the two"),
        (["--merge"], "which is no adapter"),
        (["--tokenizer", "./nowhere"], "./nowhere, which does not exist"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(run, tmp_path, capsys, options, said):
    assert export.main([str(run), str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["hf", "dcp"])
def test_a_disk_that_is_full_is_told_readably_and_nothing_stays(run, tmp_path, capsys, layout):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file may grow beyond: the same error, as early
    try:
        status = export.main([str(run), str(tmp_path / "out"), "--format", layout, "--dtype", "fp32"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2 and "expected a folder on a disk with room for the model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", ["hf", "dcp"])
def test_damage_that_shows_while_exporting_is_named_and_nothing_stays(ranks, source, tmp_path, capsys, layout):
    ranks(1, checkpoint_of, source, step_folder(tmp_path / "run", 0), 0, timeout=120)
    file = step_folder(tmp_path / "run", 0) / "rank_0.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", layout]) == 2
    assert f"{file}: got changed bytes between" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


# ---- memory
LARGE = LlamaConfig(
    vocab_size=260, hidden_size=256, intermediate_size=1024, num_hidden_layers=24, num_attention_heads=4, tie_word_embeddings=True
)
LARGE_BYTES = 24 * (4 * 256 * 256 + 3 * 256 * 1024) * 4  # of its blocks in fp32: 100 MB in tensors of at most 1 MB


def peak_bytes(action) -> int:
    """How much more memory this process had at once, at most, while `action` ran."""

    def status(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have left in the heap would hide what is asked for now
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from now
    before = status("VmRSS:")
    action()
    return status("VmHWM:") - before


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_an_export_holds_one_tensor_at_a_time_whatever_saved_it(ranks, tmp_path):
    torch.manual_seed(0)
    weights = Llama(LARGE).named_parameters()
    write_pretrained(tmp_path / "large", LARGE, weights, dtype="float32", tokenizer=byte_tokenizer(), show=False)
    ranks(2, checkpoint_of, tmp_path / "large", step_folder(tmp_path, 0), 3)
    options = ["--dtype", "fp32", "--tokenizer", str(tmp_path / "large")]
    assert export.main([str(tmp_path), str(tmp_path / "first"), *options]) == 0  # whatever is imported or allocated once
    for layout in ("hf", "dcp"):
        peak = peak_bytes(lambda: export.main([str(tmp_path), str(tmp_path / layout), *options, "--format", layout]))  # noqa: B023
        assert peak < LARGE_BYTES / 4, f"{layout}: {peak / 1e6:.0f} MB for a model of {LARGE_BYTES / 1e6:.0f} MB"
    held = peak_bytes(lambda: same_bits(tmp_path / "large", tmp_path / "dcp"))
    assert held > LARGE_BYTES, "the measure sees two models that are held"


def test_the_tokenizer_of_a_recipe_goes_before_that_of_the_weights(source, tmp_path):
    from framework.checkpoint.open import for_export

    pretrained = open_model(str(source))
    assert for_export(ModelConfig(path=str(source)), pretrained, [])["tokenizer"] == {"tokenizer": str(source)}
    named = ModelConfig(path=str(source), tokenizer="org/name", chat_template=str(tmp_path))
    assert for_export(named, pretrained, [])["tokenizer"] == {"path": str(source), "tokenizer": "org/name", "chat_template": str(tmp_path)}
    template = for_export(ModelConfig(path=str(source), chat_template=str(tmp_path)), pretrained, [])["tokenizer"]
    assert template == {"tokenizer": str(source), "chat_template": str(tmp_path)}
