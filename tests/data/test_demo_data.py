"""The shipped questions and answers about this framework: readable rows, short answers, and the one that the quickstart asks."""

from __future__ import annotations

import json

from framework.config.compose import compose
from framework.config.paths import asset_dir
from framework.config.schema import DataConfig
from framework.data.prepare import prepare
from framework.data.sources import peek

CONFIG = DataConfig(train="data/framework_qa.jsonl", validation_fraction=0.1)  # as conf/data/demo.yaml


def test_about_a_hundred_different_questions_with_short_answers():
    rows = [json.loads(line) for line in (asset_dir("recipes") / "data" / "framework_qa.jsonl").read_text(encoding="utf-8").splitlines()]
    questions, answers = zip(*([turn["content"] for turn in row["messages"]] for row in rows), strict=True)
    assert 95 <= len(rows) <= 115 and len(set(questions)) == len(rows)
    assert all(len(answer) < 160 and answer.endswith(".") for answer in answers)
    assert peek(CONFIG) == []


def test_the_question_that_the_quickstart_asks_is_trained_on(chatml):
    """Whatever the seed holds out, one of its wordings is left with the same answer."""
    for seed in range(5):
        prepared = prepare(CONFIG, chatml, seed=seed, show_progress=False)
        samples = [chatml.decode(prepared.train[i].input_ids) for i in range(len(prepared.train))]
        assert sum("framework turns one YAML recipe into a trained language model" in sample for sample in samples) >= 2
        assert len(prepared.validation) == round(0.1 * (len(samples) + len(prepared.validation)))


def test_the_question_itself_is_trained_on_with_the_seed_of_the_recipe(chatml):
    prepared = prepare(CONFIG, chatml, seed=0, show_progress=False)
    assert any("What is framework?<" in chatml.decode(prepared.train[i].input_ids) for i in range(len(prepared.train)))


def test_rows_of_another_format_may_take_the_place_of_the_demo(write_jsonl):
    path = write_jsonl([{"instruction": "Add.", "output": "5"}])
    assert peek(compose(["+recipe=llama_sft", f"data.train={path}"]).recipe.data) == []
