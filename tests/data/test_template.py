"""Turns to tokens: the same ids as inference, and exactly the assistants' texts with their stop tokens trained, whatever the template."""

from __future__ import annotations

import pytest

from framework.config.errors import UserError
from framework.data.template import ChatEncoder
from framework.data.turns import Conversation, Turn
from tests.data.templates import CHATML, GLUED, HEEDLESS, JOINED, LLAMA3, MISTRAL, QWEN3, STOPLESS, VICUNA

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "vicuna": VICUNA}
STOPS = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "mistral": "</s>", "qwen3": "<|im_end|>", "vicuna": "</s>"}

SINGLE = (Turn("user", "hello hi"), Turn("assistant", "Hello World."))
SECOND = (Turn("user", "what is a question 12?"), Turn("assistant", "No.\n\n1. \u00e9 \u2713\n"))
MULTI = (*SINGLE, *SECOND, Turn("user", "Yes!"), Turn("assistant", "a"))


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def tokenizer(family, tokenizer_with):
    return tokenizer_with(TEMPLATES[family])


def encode(tokenizer, turns, train_on="assistant"):
    (result,) = ChatEncoder(tokenizer, train_on).encode([("rows.jsonl:7", Conversation(turns))])
    if isinstance(result, UserError):
        raise result
    return result.ids.tolist(), result.trained.tolist()


def messages(turns):
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def spans(ids, trained):
    """The stretches of trained tokens, each as a list of ids."""
    found, previous = [], False
    for token_id, is_trained in zip(ids, trained, strict=True):
        if is_trained and not previous:
            found.append([])
        if is_trained:
            found[-1].append(token_id)
        previous = is_trained
    return found


@pytest.mark.parametrize("turns", [SINGLE, MULTI], ids=["single", "multi-turn"])
def test_p5_p6_the_trained_tokens_are_the_answers_with_their_stop_tokens(tokenizer, family, turns):
    """Also where pad is eos is the stop token, as in this tokenizer."""
    texts = [tokenizer.decode(span) for span in spans(*encode(tokenizer, turns))]
    answers = [turn.content for turn in turns if turn.role == "assistant"]
    if family == "llama3":  # trims
        answers = [answer.strip() for answer in answers]
    if family in ("mistral", "vicuna"):  # a space belongs to the answer, since the prompt does not end with one
        answers = [" " + answer for answer in answers]
    if family == "qwen3":  # what inference lets the model write for the last turn
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    assert texts == [answer + STOPS[family] for answer in answers]


@pytest.mark.parametrize("turns", [SINGLE, MULTI], ids=["single", "multi-turn"])
def test_p8_the_ids_are_those_of_inference(tokenizer, turns):
    """The whole conversation, and before each answer exactly the prompt that the template gives at inference."""
    ids, trained = encode(tokenizer, turns)
    assert ids == list(tokenizer.apply_chat_template(messages(turns), tokenize=True, return_dict=False))
    starts = [at for at in range(1, len(ids)) if trained[at] and not trained[at - 1]]
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    for start, index in zip(starts, answers, strict=True):
        assert ids[:start] == list(tokenizer.apply_chat_template(messages(turns[:index]), add_generation_prompt=True, return_dict=False))


def test_p9_exactly_one_bos_where_the_template_writes_one(tokenizer_with):
    for template in (LLAMA3, MISTRAL):
        tokenizer = tokenizer_with(template)
        ids, _ = encode(tokenizer, MULTI)
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(UserError, match="starts with '<s>' twice"):
        encode(tokenizer_with("{{ bos_token }}" + MISTRAL), SINGLE)


def test_p7_a_turn_of_weight_0_trains_nothing_but_stays_in_the_context(chatml):
    muted = (MULTI[0], Turn("assistant", MULTI[1].content, trained=False), *MULTI[2:])
    ids, trained = encode(chatml, muted)
    assert ids == encode(chatml, MULTI)[0]
    assert len(spans(ids, trained)) == 2


def test_p33_consecutive_turns_of_one_role_are_legal_where_the_template_takes_them(chatml):
    turns = (Turn("user", "a"), Turn("user", "b"), Turn("assistant", "hello"), Turn("assistant", "hi"))
    assert [chatml.decode(span) for span in spans(*encode(chatml, turns))] == ["hello<|im_end|>", "hi<|im_end|>"]


def test_p33_and_are_a_named_error_where_it_does_not(tokenizer_with):
    with pytest.raises(UserError) as caught:
        encode(tokenizer_with(MISTRAL), (Turn("user", "a"), Turn("user", "b"), Turn("assistant", "hello")))
    assert "rows.jsonl:7: got turns that the chat template refuses (roles must alternate user/assistant)" in str(caught.value)
    assert "user, user, assistant" in str(caught.value)


def test_p33_a_turn_that_the_template_passes_over_is_an_error_that_names_it(tokenizer_with):
    """It may stand in the text elsewhere."""
    with pytest.raises(UserError) as caught:
        encode(tokenizer_with(HEEDLESS), (Turn("user", "hi"), Turn("assistant", "hello"), Turn("user", "b"), Turn("user", "hi"), SINGLE[1]))
    assert "rows.jsonl:7: got a chat template that leaves out or changes turn 4 (user: 'hi')" in str(caught.value)
    assert "turns 3 and 4 are both of the role user" in str(caught.value)


def test_p33_answers_in_a_row_that_the_template_joins_are_an_error_that_names_them(tokenizer_with):
    with pytest.raises(UserError, match="turns 2 and 3 are both of the role assistant"):
        encode(tokenizer_with(JOINED), (*SINGLE, Turn("assistant", "hi")))


@pytest.mark.parametrize(("template", "turns", "said"), [
    (STOPLESS + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", MULTI, "no special token after the answer of turn 2"),
    (QWEN3, (MULTI[0], Turn("assistant", "<think>hm</think>\nyes"), *MULTI[2:]), "changes the text of turn 2"),
    (GLUED, (Turn("user", "hello"), Turn("assistant", "the user asks")), "share a token"),
    (CHATML, (Turn("assistant", "hello"), Turn("user", "a")), "starts with the assistant"),
    ("{% if add_generation_prompt %}x{% endif %}" + CHATML, SINGLE, "is not how the conversation goes on"),
])  # fmt: skip
def test_what_cannot_be_trained_exactly_is_refused_with_the_place_where_it_fails(tokenizer_with, template, turns, said):
    with pytest.raises(UserError) as caught:
        encode(tokenizer_with(template), turns)
    assert said in str(caught.value) and "rows.jsonl:7" in str(caught.value)


PLAIN_HEADERS = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
HEADERS = "{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>' + m.content + '<|eot|>' }}{% endfor %}"


@pytest.mark.parametrize(("template", "said", "advice"), [
    ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'", "writes `messages`"),
    ("{% for m in messages %}\n{{ m.content }}", "fails on a question and its answer", "line 2"),
    (STOPLESS, "no special token after an answer, which it writes as 'assistant: Yes.", "{{ eos_token }} after"),
    (STOPLESS.replace("'assistant:'", "'assistant: '"), "no special token after an answer", "{{ eos_token }} after"),
    (HEADERS, "without a generation prompt, from which the model would learn to write '<|header|>assistant<|/header|>'",
     "{% if add_generation_prompt %}"),
    (PLAIN_HEADERS, "without a generation prompt, from which the model would learn to write 'assistant: '", "add_generation_prompt"),
])  # fmt: skip
def test_what_is_wrong_with_the_template_itself_is_one_problem_of_it_before_any_row(tokenizer_with, template, said, advice):
    with pytest.raises(UserError) as caught:
        ChatEncoder(tokenizer_with(template))
    (problem,) = caught.value.problems
    assert problem.path == "model.chat_template" and said in str(caught.value) and advice in str(caught.value)


def test_a_header_that_inference_leaves_to_the_model_is_trained(tokenizer_with):
    """A prompt may end within the header: gpt-oss's does."""
    tokenizer = tokenizer_with(HEADERS + "{% if add_generation_prompt %}{{ '<|header|>assistant' }}{% endif %}")
    assert [tokenizer.decode(span) for span in spans(*encode(tokenizer, SINGLE))] == ["<|/header|>Hello World.<|eot|>"]


def test_white_space_before_an_answer_is_no_header_and_where_all_is_trained_none_is_refused(tokenizer_with):
    assert ChatEncoder(tokenizer_with(MISTRAL)).encode([("rows.jsonl:1", Conversation(SINGLE))])[0].trained.any()
    assert encode(tokenizer_with(PLAIN_HEADERS), SINGLE, "all")[1].count(False) == 1


SYSTEMS = (Turn("system", "the user"), Turn("user", "hello hi"), Turn("system", "Yes!"), *SINGLE)
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_several_system_turns_are_legal_where_the_template_writes_all_of_them(tokenizer_with):
    ids, _ = encode(tokenizer_with(CHATML), SYSTEMS)
    assert tokenizer_with(CHATML).decode(ids).count("<|im_start|>system") == 2
    with pytest.raises(UserError, match=r"rows.jsonl:7: got a chat template that leaves out or changes turn 3 \(system: 'Yes!'\)"):
        encode(tokenizer_with(FIRST_SYSTEM_ONLY), SYSTEMS)


@pytest.mark.parametrize("words", ["the user", "hello", "assistant", "hello hi"])
def test_a_turn_that_is_left_out_is_missed_even_where_its_words_stand_elsewhere(tokenizer_with, words):
    """In the first system turn, a user's turn, or the template's own headers."""
    with pytest.raises(UserError, match="leaves out or changes turn 3"):
        encode(tokenizer_with(FIRST_SYSTEM_ONLY), (*SYSTEMS[:2], Turn("system", words), *SINGLE))
    with pytest.raises(UserError, match="leaves out or changes turn 2"):
        encode(tokenizer_with(HEEDLESS), (SINGLE[0], Turn("user", words), SINGLE[1]))


def test_an_answer_that_only_another_turn_still_holds_is_not_taken_for_found(tokenizer_with):
    thought = "<think>hm</think>\nyes"
    with pytest.raises(UserError, match="changes the text of turn 2|no special token after the answer of turn 2"):
        encode(tokenizer_with(QWEN3), (MULTI[0], Turn("assistant", thought), Turn("user", thought), Turn("assistant", "a")))


def test_of_turns_that_are_not_trained_nothing_is_asked(tokenizer_with):
    """So conversations that start with the assistant, and answers that the template shortens, are of use."""
    turns = (Turn("user", "a"), Turn("assistant", "<think>hm</think>\nyes"), *SECOND)
    ids, trained = encode(tokenizer_with(QWEN3), turns, "last")
    assert [tokenizer_with(QWEN3).decode(span) for span in spans(ids, trained)] == [
        "<think>\n\n</think>\n\n" + SECOND[1].content + "<|im_end|>"
    ]
    greeting = (Turn("assistant", "hello", trained=False), *SINGLE)
    assert len(spans(*encode(tokenizer_with(CHATML), greeting))) == 1


THINKING = CHATML.replace(
    "+ m.content", "+ ('(' + m.reasoning_content + ') ' if m.reasoning_content and (loop.last or m.role == 'tool') else '') + m.content"
)


def test_reasoning_apart_from_the_content_is_trained_where_the_template_writes_it(tokenizer_with):
    thought = Turn("assistant", "No.", reasoning="hm\n")
    assert [tokenizer_with(THINKING).decode(span) for span in spans(*encode(tokenizer_with(THINKING), (SINGLE[0], thought)))] == [
        "(hm\n) No.<|im_end|>"
    ]


def test_reasoning_that_the_template_leaves_out_is_refused_where_it_would_have_been_trained(tokenizer_with):
    turns = (SINGLE[0], Turn("assistant", "No.", reasoning="hm"), SINGLE[0], Turn("assistant", "No.", reasoning="ah"))
    with pytest.raises(UserError, match="rows.jsonl:7: got a chat template that leaves out `reasoning_content` of turn 2: 'hm'"):
        encode(tokenizer_with(THINKING), turns)
    assert len(spans(*encode(tokenizer_with(THINKING), turns, "last"))) == 1


def test_a_wrong_row_does_not_spoil_the_others_of_its_group(chatml):
    results = ChatEncoder(chatml).encode(
        [("r:1", Conversation(MULTI)), ("r:2", Conversation((Turn("assistant", "x"),))), ("r:3", Conversation(SINGLE))]
    )
    assert isinstance(results[1], UserError)
    for result, turns in ((results[0], MULTI), (results[2], SINGLE)):
        assert (result.ids.tolist(), result.trained.tolist()) == encode(chatml, turns)


def test_an_answer_that_contains_the_text_of_a_stop_token_is_trained_to_its_real_end(chatml):
    ids, trained = encode(chatml, (Turn("user", "a"), Turn("assistant", "write <|im_end|> to stop")))
    assert chatml.decode(spans(ids, trained)[0]) == "write <|im_end|> to stop<|im_end|>"


def test_an_answer_whose_words_stand_in_what_the_template_inserts_is_found_all_the_same(tokenizer_with):
    tokenizer = tokenizer_with(QWEN3.replace("<think>\n\n", "<think>yes or no<|eot|>"))
    ids, trained = encode(tokenizer, (Turn("user", "a"), Turn("assistant", "yes")))
    assert tokenizer.decode(spans(ids, trained)[0]) == "<think>yes or no<|eot|></think>\n\nyes<|im_end|>"


def test_a_tokenizer_without_template_is_refused_before_any_row(tokenizer_with):
    with pytest.raises(UserError, match="model.chat_template: got a tokenizer without a chat template"):
        ChatEncoder(tokenizer_with(None))
