"""The base and the data that benchmarks train on: made on the spot from a seed, fetched from nowhere.

    base = small_base(tmp / "base")                       # 9 M parameters, float32, loads on both backends
    data = small_data(tmp / "data", train_rows=336)       # train.jsonl, valid.jsonl, test.jsonl

The weights are random: good for speed, memory and bookkeeping, useless for anything about what a model learns.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 2048, 512, 1024, 6, 8, 4, 64
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of a decoder layer, as peft names them."""

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_WORDS = (
    "order", "invoice", "password", "delivery", "refund", "account", "monday", "window", "please", "arrived", "waiting",
    "wrong", "amount", "again", "customer", "number", "ticket", "answer", "question", "shop", "open", "closed",
    "morning", "evening", "payment", "card", "letter", "box", "return",
)  # fmt: skip


def small_base(folder: Path, seed: int = 0) -> Path:
    """Write a Llama with random float32 weights, and its tokenizer."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.04).astype(np.float32)

    _write_tokenizer(folder)
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for number in range(LAYERS):
        name = f"model.layers.{number}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": weight(HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(HIDDEN, INNER),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: cc0-1.0\n---\nRandom weights.\n", encoding="utf-8")
    return folder


def small_data(folder: Path, train_rows: int, valid_rows: int = 16, test_rows: int = 4, seed: int = 0) -> Path:
    """Chats of about 40 to 70 tokens, a third of them the answer's."""
    draw = random.Random(seed)

    def row() -> dict[str, Any]:
        question = " ".join(draw.choices(_WORDS, k=draw.randint(15, 35)))
        answer = " ".join(draw.choices(_WORDS, k=draw.randint(8, 20)))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train_rows), ("valid", valid_rows), ("test", test_rows)):
        lines = "".join(json.dumps(row()) + "\n" for _ in range(count))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer in which each of `_WORDS` is about one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS), " ".join(reversed(_WORDS))], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "clean_up_tokenization_spaces": False,
        "bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": _CHATML,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
