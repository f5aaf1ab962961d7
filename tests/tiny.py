"""Small real things that tests share: a tokenizer, data files. Each is made in milliseconds and fetched from nowhere.

tokenizer = load_tokenizer(tiny_tokenizer(tmp_path / "base"))
folder = tiny_folder(tmp_path / "data", train=[chat("Hello", "Good day")])
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat as SmolLM2, Qwen and others write it; takes any roles in any order."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

_SENTENCES = (
    "Where is my order? It has not arrived and I am waiting since Monday.",
    "The invoice is wrong, please correct the amount and send it again.",
    "O sistema não aceita a minha palavra-passe, já tentei três vezes.",
    "Queria saber a que horas abre a loja amanhã, obrigada pela atenção.",
    "system user assistant billing technical other yes no",
)


def tiny_tokenizer(
    folder: Path, template: str | None = CHATML, eos: str = "<|im_end|>", eos_is_pad: bool = False, bos: bool = False
) -> Path:
    """Write a byte-level BPE tokenizer of about 500 tokens into `folder`, and return the folder.

    Any text encodes and decodes without loss. Token ids 0 to 4 are `SPECIAL_TOKENS` in that order.

    Args:
        template: the chat template, None for a tokenizer without one.
        eos: which special token is the end token.
        eos_is_pad: whether padding is the end token, as in many published bases.
        bos: whether `<s>` is put before a text when special tokens are asked for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": eos,
        "pad_token": eos if eos_is_pad else "<pad>",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as the package itself loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chat(*contents: str, system: str = "") -> dict[str, Any]:
    """A row of format messages: user, assistant, user, ... in turn, after a system turn when one is given."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}, *turns] if system else turns}


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write one JSON object a line, in UTF-8, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(lines.encode("utf-8"))
    return path


def tiny_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows of format messages, each with its own question."""
    return [
        chat(f"Where is order {number}?", f"Order {number} is on its way.") for number in range(start, start + count)
    ]


def tiny_folder(
    folder: Path, train: list[Any] | None = None, valid: list[Any] | None = None, test: list[Any] | None = None
) -> Path:
    """Write train.jsonl (6 rows), valid.jsonl (2) and test.jsonl (2), or the rows that are given."""
    write_jsonl(folder / "train.jsonl", tiny_rows(6) if train is None else train)
    write_jsonl(folder / "valid.jsonl", tiny_rows(2, start=100) if valid is None else valid)
    write_jsonl(folder / "test.jsonl", tiny_rows(2, start=200) if test is None else test)
    return folder
