"""A real Llama of 0.2 M parameters that both backends load, and helpers to train it in the test's own process.

base = tiny_base(tmp_path / "base")
run = train_tiny("mlx", base, tokens, tmp_path / "out", seed=7)
run.losses, run.adapter
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lemon_mlflow.config import Recipe, load_recipe
from lemon_mlflow.data.prepare import PrepareJob, prepare
from lemon_mlflow.train.loop import TrainJob, train
from tests.tiny import chat, tiny_tokenizer, write_jsonl

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 64, 128, 4, 2, 16


def tiny_base(folder: Path, layers: int = 4, seed: int = 0) -> Path:
    """Write a float32 Llama with random weights, and its tokenizer."""
    from safetensors.numpy import save_file

    tiny_tokenizer(folder)
    vocabulary = 512
    generator = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.08).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for number in range(layers):
        name = f"model.layers.{number}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": weight(_HEADS * _HEAD, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(_KV_HEADS * _HEAD, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(_KV_HEADS * _HEAD, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(_HIDDEN, _HEADS * _HEAD),
            f"{name}.mlp.gate_proj.weight": weight(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(_HIDDEN, _INNER),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": vocabulary,
        "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": layers, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: cc0-1.0\n---\nRandom weights, for tests.\n", encoding="utf-8")
    return folder


def varied_folder(folder: Path, train_rows: int = 22, valid_rows: int = 5) -> Path:
    """Rows of different lengths; the counts are no multiples of 2 or 4, so that partial batches occur."""

    def row(number: int) -> dict[str, Any]:
        return chat(
            f"Tell me about item {number}. " + "More, please. " * (number % 5),
            "yes " * (1 + number % 4) + str(number % 7),
        )

    write_jsonl(folder / "train.jsonl", [row(number) for number in range(train_rows)])
    write_jsonl(folder / "valid.jsonl", [row(number) for number in range(1000, 1000 + valid_rows)])
    write_jsonl(folder / "test.jsonl", [row(number) for number in range(2000, 2003)])
    return folder


def tokenised(base: Path, data: Path, out: Path) -> Path:
    """tokens.npz of a data folder."""
    out.mkdir(parents=True, exist_ok=True)
    prepare(
        PrepareJob(str(data), Recipe().data.model_dump(mode="json"), str(base), 512, str(out)), lambda *a, **k: None
    )
    return out / "tokens.npz"


@dataclass(frozen=True)
class TinyRun:
    """What a run said, and where its adapter is."""

    events: list[dict[str, Any]]
    out: Path
    result: dict[str, Any]

    @property
    def adapter(self) -> Path:
        return self.out / "adapter"

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events if event["event"] == "step"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "step"]

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "validation"]


def job_for(backend: str, base: Path, tokens: Path, out: Path, resume_from: str = "", **keys: Any) -> TrainJob:
    """A training job; `keys` are recipe keys with `__` for the dot, over small defaults."""
    defaults = {"train.learning_rate": 1e-2, "train.batch_size": 2, "train.gradient_accumulation": 2, "lora.rank": 4}
    given = {key.replace("__", "."): value for key, value in keys.items()}
    recipe = load_recipe(None, {**defaults, **given}).recipe
    lora = recipe.lora
    targets = () if lora.target_modules == "all-linear" else lora.target_modules
    return TrainJob(
        backend,
        {"folder": str(base), "name": "tiny", "commit": "", "quantization": recipe.base.quantization.replace("auto", "none"),
         "dtype": recipe.base.dtype},
        {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout, "layers": lora.layers, "target_modules": targets},
        recipe.train.model_dump(mode="json"), str(tokens), str(out), resume_from,
    )  # fmt: skip


def train_tiny(backend: str, base: Path, tokens: Path, out: Path, resume_from: str = "", **keys: Any) -> TinyRun:
    """Train in this process."""
    out.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = []
    job = job_for(backend, base, tokens, out, resume_from, **keys)
    result = train(job, lambda event, **fields: events.append({"event": event, **fields}))
    return TinyRun(events, out, result)
