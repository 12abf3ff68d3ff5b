"""Generation: the cache, sampling, stopping, streaming; and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from framework.checkpoint.open import open_model
from framework.cli import generate as command
from framework.config.errors import UserError
from framework.models.generate import choose, generate, generate_ids, load_for_generation, prompt_ids
from framework.models.llama import Llama
from framework.models.pretrained import open_pretrained, write_pretrained
from tests.models.families import VOCABULARY, byte_tokenizer, oracle
from tests.models.test_gguf import SMOLLM, needs_smollm
from tests.models.test_llama import ours

TURNS = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model() -> Llama:
    return ours("mistral").eval()


def export(folder: Path) -> Path:
    model = ours("llama3")
    return write_pretrained(folder, model.config, model.named_parameters(), dtype="float32", tokenizer=byte_tokenizer())


@torch.no_grad()
def greedy_without_cache(model: Llama, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_ids_equal_those_without_a_cache(model: Llama):
    prompt = [5, 17, 99, 3]
    assert list(generate_ids(model, prompt, 30)) == greedy_without_cache(model, prompt, 30)


def test_generation_ends_before_a_stop_token(model: Llama):
    ids = greedy_without_cache(model, [5, 17], 20)
    stop = ids[6]
    assert list(generate_ids(model, [5, 17], 20, stop_ids=[stop])) == ids[: ids.index(stop)]


def test_generation_ends_at_the_longest_sequence(model: Llama):
    assert len(list(generate_ids(model, [1] * 60, 100))) == 4
    with pytest.raises(UserError, match="got 64 tokens"):
        list(generate_ids(model, [1] * 64, 1))


def test_sampling_is_reproducible_and_follows_the_seed(model: Llama):
    def draw(seed: int) -> list[int]:
        return list(generate_ids(model, [5, 17], 20, temperature=1.0, seed=seed))

    assert draw(1) == draw(1) != draw(2)


def test_nucleus_sampling_keeps_the_fewest_tokens_that_reach_top_p():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {choose(logits, 1.0, top_p, generator) for _ in range(300)}

    assert drawn(1.0) == {0, 1, 2, 3}
    assert drawn(0.7) == {1, 3}
    assert drawn(0.01) == {1}
    assert {choose(logits, 0.05, 1.0, generator) for _ in range(100)} == {1}, "cold sampling is nearly greedy"


def test_p8_a_conversation_has_the_ids_of_the_template(model: Llama):
    tokenizer = byte_tokenizer()
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids(tokenizer, TURNS) == tokenizer(text)["input_ids"]
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        generate(model, tokenizer, TURNS, 5)


def test_p9_a_tokenizer_that_wants_a_bos_gets_exactly_one():
    tokenizer = byte_tokenizer()
    bos, bos_id = "<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    for prompt in ("Hello", TURNS):
        ids = prompt_ids(tokenizer, prompt)
        assert ids[0] == bos_id and ids.count(bos_id) == 1


def test_streamed_pieces_join_to_the_answer_and_never_split_a_character():
    """A model that can only say one thing, in bytes: characters of several tokens arrive whole."""
    tokenizer, said = byte_tokenizer(), "né 🎉!"
    script = tokenizer.backend_tokenizer.encode(said).ids
    assert len(script) == len(said.encode()), "one token per byte"

    class Parrot(torch.nn.Module):
        config = oracle("llama3").config

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.said = 0

        def forward(self, tokens, cache, logits_to_keep):
            logits = torch.nn.functional.one_hot(torch.tensor([[script[self.said]]]), VOCABULARY).float()
            self.said += 1
            return logits

    pieces: list[str] = []
    assert generate(Parrot(), tokenizer, "x", len(script), on_text=pieces.append) == said
    assert "".join(pieces) == said
    assert "🎉" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_a_run_directory_answers_from_its_export(tmp_path: Path):
    folder = export(tmp_path / "run" / "export")
    from_run, tokenizer, stops = load_for_generation(open_model(str(tmp_path / "run")))
    from_folder, _, _ = load_for_generation(open_pretrained(folder))
    assert stops == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert generate(from_run, tokenizer, TURNS, 8) == generate(from_folder, tokenizer, TURNS, 8)


@needs_smollm
def test_smollm2_knows_the_capital_of_france():
    model, tokenizer, stops = load_for_generation(open_pretrained(SMOLLM))
    assert generate(model, tokenizer, "The capital of France is", 4, stop_ids=stops).startswith(" Paris")
    assert "Paris" in generate(model, tokenizer, [{"role": "user", "content": "What is the capital of France?"}], 12, stop_ids=stops)


def test_the_command_prints_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = export(tmp_path / "model")
    model, tokenizer, stops = load_for_generation(open_pretrained(folder))
    assert command.main(["--model", str(folder), "Hello", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == generate(model, tokenizer, TURNS, 8, stop_ids=stops) + "\n"
    assert command.main(["--model", str(folder), "Hello", "--max-new-tokens", "8", "--raw"]) == 0
    assert capsys.readouterr().out == generate(model, tokenizer, "Hello", 8, stop_ids=stops) + "\n"


def test_a_dash_takes_a_prompt_from_each_line_of_standard_input(tmp_path: Path, capsys, monkeypatch):
    folder = export(tmp_path / "model")
    command.main(["--model", str(folder), "Hello", "--max-new-tokens", "8"])
    answer = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", ["Hello\n", "\n", "Hello"])
    assert command.main(["--model", str(folder), "-", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"> Hello\n{answer}\n" * 2


def test_the_command_tells_all_mistakes_at_once_without_torch(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: run\n")
    program = (
        "import sys; from framework.cli.generate import main\n"
        f"status = main(['--model', {str(tmp_path)!r}, '', '--top-p', '2', '--temperature', '-1', '--max-new-tokens', '0'])\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.returncode == 2, result.stderr
    for expected in ("--top-p: got 2.0", "--temperature: got -1.0", "--max-new-tokens: got 0", "prompt: got ''", "without an export"):
        assert expected in result.stderr
    assert "Traceback" not in result.stderr
