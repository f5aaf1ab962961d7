"""From checked rows to token ids with a mask of the tokens that carry loss.

    encoded = encode(tokenizer, row, train_on="answers")
    encoded.ids, encoded.trainable           # tuple of int, tuple of bool of the same length

What is learned is each answer and the end token after it; headers, system prompt and user turns are masked. The chat
template is rendered twice, the second time with a marker in place of the answer, so that the answer is found in *every*
template: also in one whose generation prompt is not a prefix of the whole, or which rewrites earlier turns. Rows whose
answer cannot be found are refused, never trained on blindly.

Lengths are counted after the template, with the end token. Longer rows are removed whole; nothing is ever cut.

`tokenizer` is a Hugging Face tokenizer; this module imports no model code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Refusal
from .read import Message, Row

_MARKER = "\u2042LEMON\u2042"


@dataclass(frozen=True)
class Encoded:
    """One tokenised row.

    Attributes:
        ids: token ids of the whole row, special tokens and end token included.
        trainable: for each token whether predicting it counts in the loss. Position 0 is never predicted.
        prompt_is_prefix: whether the text before the last answer is what the template gives as generation prompt; when
            it is not, the model is asked something else later than it was trained on.
    """

    ids: tuple[int, ...]
    trainable: tuple[bool, ...]
    prompt_is_prefix: bool = True

    @property
    def trainable_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(self.trainable[1:])


def encode(tokenizer: Any, row: Row, train_on: str) -> Encoded:
    """Tokenise one row.

    Args:
        tokenizer: a Hugging Face tokenizer.
        train_on: `answers`, `last_answer` or `all_tokens`.

    Raises:
        Refusal: `template_refuses_row`, `no_chat_template`, `answer_not_found`.
    """
    if row.format == "text":
        ids = [*tokenizer(row.text, add_special_tokens=True)["input_ids"]]
        ids = ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        return Encoded(tuple(ids), (True,) * len(ids))
    if not tokenizer.chat_template:
        return _encode_without_template(tokenizer, row, train_on)
    full = render(tokenizer, row.messages, row.where)
    spans = [_answer_span(tokenizer, row, index, full) for index in _answers(row.messages, train_on)]
    ids, trainable = _tokenise(tokenizer, full, spans)
    if train_on == "all_tokens":
        trainable = [True] * len(ids)
    prompt = _generation_prompt(tokenizer, row, len(row.messages) - 1)
    return Encoded(tuple(ids), tuple(trainable), full[: spans[-1][0]] == prompt)


def render(tokenizer: Any, messages: Sequence[Message], where: str, prompt: bool = False) -> str:
    """The chat as text, by the tokenizer's own template.

    Raises:
        Refusal: `template_refuses_row`.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # a template is a program: it may raise anything
        roles = ", ".join(message.role for message in messages)
        raise Refusal(
            "template_refuses_row",
            f"the base's chat template does not take the roles {roles} ({_own_words(error, messages)})",
            where,
            "change the turns of that row (many templates take no system turn: put it into the first user turn)",
        ) from None
    return str(text)


def _own_words(error: Exception, messages: Sequence[Message]) -> str:
    """What the template says, unless it quotes the row: example texts go into no log."""
    text = str(error)[:120]
    quotes = any(word in text for message in messages for word in message.content.split() if len(word) > 5)
    return type(error).__name__ if quotes else text


def _answers(messages: Sequence[Message], train_on: str) -> list[int]:
    indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return indices[-1:] if train_on == "last_answer" else indices


def _answer_span(tokenizer: Any, row: Row, index: int, full: str) -> tuple[int, int]:
    """Characters [start, end) of the answer `messages[index]` in the rendered chat."""
    marked = [*row.messages]
    marked[index] = Message("assistant", _MARKER)
    with_marker = render(tokenizer, marked, row.where)
    at = with_marker.find(_MARKER)
    if at >= 0:
        before, after = with_marker[:at], with_marker[at + len(_MARKER) :]
        if full.startswith(before) and full.endswith(after) and len(before) + len(after) < len(full):
            # Blanks that the generation prompt lacks (Mistral's) are the model's to write: they belong to the answer.
            prompt = _generation_prompt(tokenizer, row, index)
            ours = len(prompt) if before.startswith(prompt) and before[len(prompt) :].isspace() else len(before)
            return ours, len(full) - len(after)
        # A template that treats the content itself (a thinking section): only the generation prompt helps.
        prompt = _generation_prompt(tokenizer, row, index)
        if prompt and full.startswith(prompt) and full.endswith(after) and len(prompt) + len(after) < len(full):
            return len(prompt), len(full) - len(after)
    raise Refusal(
        "answer_not_found",
        f"the base's chat template hides the answer of turn {index + 1}, so nothing can be learned from it",
        f"{row.where} ({row.id})",
        "set data.train_on: last_answer, or use rows of prompt and completion",
    )


def _generation_prompt(tokenizer: Any, row: Row, index: int) -> str:
    """What the model is given before it writes `messages[index]`; "" when the template cannot say."""
    try:
        return render(tokenizer, row.messages[:index], row.where, prompt=True)
    except Refusal:
        return ""


def _tokenise(tokenizer: Any, full: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Token ids of `full`, and which of them are in a span or are the end token after one.

    The text is cut at the spans' borders and the parts are tokenised one by one, because that is what happens later: the
    prompt is tokenised alone, and the answer is generated token by token after it.
    """
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    ids: list[int] = _ids(tokenizer, full[: spans[0][0]])
    trainable = [False] * len(ids)
    for number, (start, end) in enumerate(spans):
        answer = _ids(tokenizer, full[start:end])
        last = number == len(spans) - 1
        after = _ids(tokenizer, full[end:] if last else full[end : spans[number + 1][0]])
        ended = _tokens_to_the_end(tokenizer, after, special, last)
        if last and not any(token in special for token in after):
            # The template ends no turn: without an end token the adapter would never learn to stop.
            after, ended = [tokenizer.eos_token_id, *after], 1
        ids += answer + after
        trainable += [True] * (len(answer) + ended) + [False] * (len(after) - ended)
    return ids, trainable


def _tokens_to_the_end(tokenizer: Any, after: list[int], special: set[int], last: bool) -> int:
    """How many tokens after an answer still belong to it: up to the first special token, if only blanks precede it.

    After the last answer other text may precede the end token (`### End</s>`): the model must write it to stop.
    """
    for number, token in enumerate(after):
        if token in special:
            ends = last and token == tokenizer.eos_token_id
            return number + 1 if ends or not tokenizer.decode(after[:number]).strip() else 0
    return 0


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _encode_without_template(tokenizer: Any, row: Row, train_on: str) -> Encoded:
    if row.format == "messages":
        raise Refusal(
            "no_chat_template",
            "the base's tokenizer has no chat template, so chats cannot be written for it",
            row.where,
            "use an instruct base, or rows of prompt and completion",
        )
    prompt = list(tokenizer(row.messages[0].content, add_special_tokens=True)["input_ids"])
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()
    answer = [*_ids(tokenizer, row.messages[1].content), tokenizer.eos_token_id]
    mask = [train_on == "all_tokens"] * len(prompt) + [True] * len(answer)
    return Encoded((*prompt, *answer), tuple(mask))
