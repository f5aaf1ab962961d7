"""Which tokens carry loss, in templates of every kind. Each test decodes what is learned, and reads it as text."""

import pytest

from lemon_mlflow.config import DataSection
from lemon_mlflow.data.read import Row, read_folder
from lemon_mlflow.data.tokens import Encoded, encode, render
from lemon_mlflow.errors import Refusal
from tests.tiny import CHATML, chat, load_tokenizer, tiny_folder, tiny_tokenizer

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Takes no system turn, trims nothing, has no generation prompt, and puts a blank before each answer."""

THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% set answer = message['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1] %}"
    "{% set thought = thought if '</think>' in message['content'] else '' %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ answer }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Strips the thinking section of earlier turns, and gives the last turn one even when the row has none."""

OTHER_PROMPT = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
"""Its generation prompt is not a prefix of the rendered chat."""

NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Ends no turn with a special token."""

ONLY_LAST = CHATML.replace("in messages %}", "in messages[-2:] %}")
"""Hides every turn before the last two."""

TRIMMING = CHATML.replace("message['content']", "(message['content'] | trim)")
NO_ANSWERS = "{% for message in messages if message['role'] != 'assistant' %}{{ message['content'] }}{% endfor %}"
LOWERING = CHATML.replace("message['content']", "(message['content'] | lower)")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = {}

    def make(template=CHATML, **settings):
        key = (template, *sorted(settings.items()))
        if key not in made:
            made[key] = load_tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, **settings))
        return made[key]

    return make


@pytest.fixture
def row(tmp_path):
    def make(content) -> Row:
        folder = tiny_folder(tmp_path / "data", [content], [content], [content])
        return read_folder(folder, DataSection(min_train_rows=1)).splits["train"][0]

    return make


def learned(tokenizer, encoded: Encoded) -> list[str]:
    """The runs of tokens that carry loss, decoded."""
    runs: list[list[int]] = []
    before = False
    for token, trainable in zip(encoded.ids[1:], encoded.trainable[1:], strict=True):
        if trainable:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = trainable
    return [tokenizer.decode(run) for run in runs]


def size(tokenizer, *texts: str) -> int:
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def refused(tokenizer, row, train_on="answers") -> Refusal:
    with pytest.raises(Refusal) as caught:
        encode(tokenizer, row, train_on)
    return caught.value


# The tokenizer of these tests


@pytest.mark.parametrize("text", ["Hello", "Peço desculpa, não há.", "日本 😀\t\u200b", " a  b\n\n"])
def test_the_tiny_tokenizer_loses_no_text(tokenizer, text):
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert tokenizer().decode(ids) == text


# ChatML


def test_the_answer_and_its_end_token_are_learned_and_nothing_else(tokenizer, row):
    """K03: not the header before the answer"""
    found = encode(tokenizer(), row(chat("Where is it?", "On its way.", system="Be kind.")), "answers")
    assert learned(tokenizer(), found) == ["On its way.<|im_end|>"]
    assert found.trainable_tokens == size(tokenizer(), "On its way.") + 1
    assert tokenizer().decode(found.ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhere is it?<|im_end|>\n"
        "<|im_start|>assistant\nOn its way.<|im_end|>\n"
    )
    assert found.prompt_is_prefix


def test_every_answer_of_a_chat_is_learned(tokenizer, row):
    """K04"""
    found = encode(tokenizer(), row(chat("One?", "First.", "Two?", "Second answer.")), "answers")
    assert learned(tokenizer(), found) == ["First.<|im_end|>", "Second answer.<|im_end|>"]
    assert found.trainable_tokens == size(tokenizer(), "First.", "Second answer.") + 2


def test_only_the_last_answer_is_learned_when_asked(tokenizer, row):
    """K04"""
    found = encode(tokenizer(), row(chat("One?", "First.", "Two?", "Second answer.")), "last_answer")
    assert learned(tokenizer(), found) == ["Second answer.<|im_end|>"]
    assert found.trainable_tokens == size(tokenizer(), "Second answer.") + 1


def test_all_tokens_are_learned_when_asked_but_the_first_is_never_predicted(tokenizer, row):
    """K02"""
    found = encode(tokenizer(), row(chat("One?", "First.")), "all_tokens")
    assert all(found.trainable)
    assert found.trainable_tokens == len(found.ids) - 1


def test_the_three_policies_see_the_same_tokens(tokenizer, row):
    content = row(chat("One?", "First.", "Two?", "Second answer."))
    assert len({encode(tokenizer(), content, policy).ids for policy in ("answers", "last_answer", "all_tokens")}) == 1


def test_an_answer_that_repeats_the_question_is_found_in_its_own_place(tokenizer, row):
    found = encode(tokenizer(), row(chat("yes", "yes", "yes", "yes")), "last_answer")
    assert learned(tokenizer(), found) == ["yes<|im_end|>"]
    assert found.trainable.index(True) == len(found.ids) - 3  # `yes`, the end token, a line end


def test_an_answer_in_portuguese_with_lines_is_learned_whole(tokenizer, row):
    answer = "Peço desculpa.\n\nA situação é esta: não há \u2042 nem 😀"
    assert learned(tokenizer(), encode(tokenizer(), row(chat("Então?", answer)), "answers")) == [f"{answer}<|im_end|>"]


def test_the_prompt_is_cut_where_it_ends_when_the_model_answers(tokenizer, row):
    content = row(chat("Where is it?", "On its way."))
    found = encode(tokenizer(), content, "answers")
    prompt = render(tokenizer(), content.messages[:1], content.where, prompt=True)
    ids = tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    assert list(found.ids[: len(ids)]) == ids
    assert found.trainable.index(True) == len(ids)


@pytest.mark.parametrize("eos_is_pad", [False, True])
def test_the_end_token_is_learned_once_also_when_it_is_the_padding_token(tokenizer, row, eos_is_pad):
    """K09, K11"""
    made = tokenizer(eos_is_pad=eos_is_pad)
    assert (made.pad_token_id == made.eos_token_id) is eos_is_pad
    found = encode(made, row(chat("Hi", "Hello")), "answers")
    assert learned(made, found) == ["Hello<|im_end|>"]
    labels = [token for token, trainable in zip(found.ids, found.trainable, strict=True) if trainable]
    assert labels.count(made.eos_token_id) == 1


# Other templates


def test_a_template_whose_prompt_is_no_prefix_still_shows_the_answer_and_is_reported(tokenizer, row):
    """K01"""
    made = tokenizer(OTHER_PROMPT)
    found = encode(made, row(chat("Hi", "Hello", "Bye", "See you")), "answers")
    assert learned(made, found) == ["Hello<|im_end|>", "See you<|im_end|>"]
    assert not found.prompt_is_prefix


def test_a_thinking_section_is_learned_where_the_template_keeps_it(tokenizer, row):
    made = tokenizer(THINKING)
    content = row(chat("One?", "<think>\nhm\n</think>\n\nFirst.", "Two?", "<think>\nwell\n</think>\n\nSecond."))
    found = encode(made, content, "answers")
    assert learned(made, found) == ["First.<|im_end|>", "<think>\nwell\n</think>\n\nSecond.<|im_end|>"]
    assert "hm" not in made.decode(found.ids)
    assert found.prompt_is_prefix


def test_an_empty_thinking_section_that_the_template_adds_is_not_learned_and_is_reported(tokenizer, row):
    made = tokenizer(THINKING)
    found = encode(made, row(chat("One?", "First.")), "answers")
    assert "<think>\n\n</think>\n\nFirst." in made.decode(found.ids)
    assert learned(made, found) == ["First.<|im_end|>"]
    assert not found.prompt_is_prefix


def test_a_template_without_an_end_token_gets_one_after_the_last_answer(tokenizer, row):
    made = tokenizer(NO_END, eos="</s>")
    found = encode(made, row(chat("Hi", "Hello", "Bye", "See you")), "answers")
    assert learned(made, found) == ["Hello", "See you</s>"]
    assert made.decode(found.ids) == "user: Hi\nassistant: Hello\nuser: Bye\nassistant: See you</s>\n"
    assert found.ids.count(made.eos_token_id) == 1


def test_text_that_the_template_puts_before_the_end_token_is_learned_so_that_the_model_can_stop(tokenizer, row):
    """K09"""
    made = tokenizer(NO_END.replace("+ '\\n' }}", "+ ' ### End' + eos_token + '\\n' }}"), eos="</s>")
    found = encode(made, row(chat("Hi", "Hello")), "answers")
    assert made.decode(found.ids) == "user: Hi ### End</s>\nassistant: Hello ### End</s>\n"
    assert learned(made, found) == ["Hello ### End</s>"]


def test_mistral_learns_each_answer_as_the_model_will_give_it_after_the_prompt(tokenizer, row):
    made = tokenizer(MISTRAL, eos="</s>")
    found = encode(made, row(chat("Hi", "Hello", "Bye", "See you")), "answers")
    assert made.decode(found.ids) == "<s>[INST] Hi [/INST] Hello</s>[INST] Bye [/INST] See you</s>"
    assert learned(made, found) == [" Hello</s>", " See you</s>"]
    assert found.prompt_is_prefix


def test_the_space_before_an_answer_is_cut_from_the_prompt_as_when_the_model_answers(tokenizer, row):
    made = tokenizer(MISTRAL, eos="</s>")
    content = row(chat("Hi", "Hello"))
    prompt = made(render(made, content.messages[:1], content.where, prompt=True), add_special_tokens=False)["input_ids"]
    found = encode(made, content, "answers")
    assert list(found.ids[: len(prompt)]) == prompt
    assert found.trainable.index(True) == len(prompt)


def test_mistral_refuses_a_system_turn_with_the_row_and_its_roles(tokenizer, row):
    """K12"""
    refusal = refused(tokenizer(MISTRAL, eos="</s>"), row(chat("Hi", "Hello", system="Be kind.")))
    assert (refusal.code, refusal.where) == ("template_refuses_row", "train.jsonl:1")
    assert "system, user, assistant" in refusal.message
    assert "must alternate" in refusal.message


def test_any_fault_of_a_template_is_a_refusal(tokenizer, row):
    """K12"""
    refusal = refused(tokenizer("{{ messages[0]['content'] / 2 }}"), row(chat("Hi", "Hello")))
    assert (refusal.code, refusal.where) == ("template_refuses_row", "train.jsonl:1")


def test_blanks_that_the_template_trims_are_not_learned(tokenizer, row):
    made = tokenizer(TRIMMING)
    assert learned(made, encode(made, row(chat("Hi", "  Hello\n")), "answers")) == ["Hello<|im_end|>"]


@pytest.mark.parametrize(
    "template", [ONLY_LAST, NO_ANSWERS, LOWERING], ids=["hidden turn", "no answers", "changed answers"]
)
def test_a_template_that_hides_an_answer_is_refused_with_row_and_turn(tokenizer, row, template):
    """K01, K06"""
    refusal = refused(tokenizer(template), row({**chat("Hi", "Hello", "Bye", "See you"), "id": "row-7"}))
    assert (refusal.code, refusal.where) == ("answer_not_found", "train.jsonl:1 (row-7)")
    assert "turn 2" in refusal.message


def test_the_last_answer_can_be_learned_when_earlier_ones_are_hidden(tokenizer, row):
    made = tokenizer(ONLY_LAST)
    found = encode(made, row(chat("Hi", "Hello", "Bye", "See you")), "last_answer")
    assert learned(made, found) == ["See you<|im_end|>"]


# Rows that are no chats


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_is_learned_whole_and_gets_its_end_token(tokenizer, row, bos):
    made = tokenizer(None, eos="</s>", bos=bos)
    found = encode(made, row({"text": "Era uma vez"}), "answers")
    assert made.decode(found.ids) == ("<s>" if bos else "") + "Era uma vez</s>"
    assert all(found.trainable)
    assert found.trainable_tokens == len(found.ids) - 1


def test_a_text_that_ends_with_its_end_token_gets_no_second(tokenizer, row):
    made = tokenizer(None, eos="</s>")
    assert encode(made, row({"text": "Era uma vez</s>"}), "answers").ids.count(made.eos_token_id) == 1


@pytest.mark.parametrize("bos", [False, True])
def test_a_completion_without_a_chat_template_is_prompt_then_answer(tokenizer, row, bos):
    made = tokenizer(None, eos="</s>", bos=bos)
    content = row({"prompt": "2 + 2 =", "completion": " 4"})
    found = encode(made, content, "answers")
    assert made.decode(found.ids) == ("<s>" if bos else "") + "2 + 2 = 4</s>"
    assert learned(made, found) == [" 4</s>"]
    assert encode(made, content, "all_tokens").trainable_tokens == len(found.ids) - 1


def test_a_completion_with_a_chat_template_is_a_chat(tokenizer, row):
    found = encode(tokenizer(), row({"prompt": "2 + 2?", "completion": "4"}), "answers")
    assert tokenizer().decode(found.ids) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert learned(tokenizer(), found) == ["4<|im_end|>"]


def test_a_chat_without_a_chat_template_is_refused(tokenizer, row):
    refusal = refused(tokenizer(None), row(chat("Hi", "Hello")))
    assert (refusal.code, refusal.where) == ("no_chat_template", "train.jsonl:1")
