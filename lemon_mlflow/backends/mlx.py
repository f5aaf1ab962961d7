"""mlx-lm's models and LoRA layers: on Apple silicon, and on Linux CPUs with `mlx[cpu]`.

Tested on a Linux CPU, float32 and affine 8 and 4 bit. It is the same code on a Mac, where it has not been run by the tests.

mlx-lm's own training loop is not used: it drops the last rows, averages averages when accumulating, counts a padding target
and seeds nothing. Its models, LoRA layers, loader and file format are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

from ..base.quantization import declared_quantization
from ..data.batches import Batch
from ..errors import Failure, Refusal
from .interface import AdapterInfo, FrameworkMemory, LoadedBase, LoadSpec, LoraSpec, initial_lora_a, pick_targets

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_GROUP_SIZE = 64


def open() -> MlxBackend:
    """A backend on the default device."""
    return MlxBackend()


class MlxBackend:
    """One causal language model with one LoRA adapter; see `interface.Backend` for what each method means."""

    def __init__(self) -> None:
        self._model: Any = None
        self._spec: LoadSpec | None = None
        self._config: dict[str, Any] = {}
        self._optimizer: Any = None
        self._gradients: Any = None
        self._value_and_grad: Callable[..., Any] | None = None
        self._head: Callable[[Any], Any] | None = None
        _wire_memory()

    def seed(self, seed: int) -> None:
        mx.random.seed(seed)

    def load_base(self, spec: LoadSpec) -> LoadedBase:
        self._model, config = load_model(Path(spec.folder))
        if spec.dtype != "auto":
            self._model.set_dtype(_DTYPES[spec.dtype])
        self._model.freeze()
        mx.eval(self._model.parameters())
        self._head = _output_head(self._model)
        self._spec = spec
        floats = [p.dtype for _, p in tree_flatten(self._model.parameters()) if mx.issubdtype(p.dtype, mx.floating)]
        compute = str(max(set(floats), key=floats.count)).removeprefix("mlx.core.")
        return LoadedBase(declared_quantization(config, compute), _device(), len(self._model.layers))

    def add_adapter(self, spec: LoraSpec, seed: int) -> AdapterInfo:
        layers = self._model.layers
        linear = sorted({name for layer in layers for name, part in layer.named_modules() if _is_linear(part)})
        targets = pick_targets(spec.target_modules, linear)
        count = len(layers) if spec.layers < 0 else spec.layers
        if count > len(layers):
            raise Refusal(
                "too_many_layers",
                f"the base has {len(layers)} decoder layers",
                f"lora.layers: {count}",
                f"use -1, or a number up to {len(layers)}",
            )
        total = sum(_logical_size(part) for _, part in self._model.named_modules())
        parameters = {"rank": spec.rank, "scale": spec.scale, "dropout": spec.dropout, "keys": targets}
        linear_to_lora_layers(self._model, count, parameters)
        self._config = {
            "fine_tune_type": "lora",
            "num_layers": count,
            "lora_parameters": parameters,
            "model": self._spec.name if self._spec else "",
            "revision": (self._spec.commit if self._spec else "") or None,
        }
        modules = []
        for number, layer in enumerate(layers):
            for name, part in layer.named_modules():
                if "lora_a" in part:
                    inner = f"{number}.{name}"
                    part.lora_a = mx.array(initial_lora_a(seed, inner, spec.rank, part.lora_a.shape[0]).T)
                    modules.append(inner)
        mx.eval(self._model.parameters())
        trainable = sum(p.size for _, p in tree_flatten(self._model.trainable_parameters()))
        return AdapterInfo(trainable, total + trainable, tuple(modules))

    def load_adapter(self, folder: Path) -> None:
        try:
            self._model = load_adapters(self._model, str(folder))
        except (ValueError, KeyError) as error:
            raise Failure(
                "adapter_incomplete",
                f"mlx-lm refuses the adapter: {error}",
                "adapter/adapters.safetensors",
                "train again; do not use this adapter",
            ) from None
        given = set(mx.load(str(folder / "adapters.safetensors")))
        present = {
            name
            for name, _ in tree_flatten(self._model.parameters())
            if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
        }
        if missing := sorted(present - given):
            raise Failure(
                "adapter_incomplete",
                f"{len(missing)} tensors are missing, the first is {missing[0]}",
                "adapter/adapters.safetensors",
                "train again; do not use this adapter",
            )
        self._model.freeze()

    def prepare_training(self, checkpointing: bool, weight_decay: float) -> None:
        if checkpointing:
            grad_checkpoint(self._model.layers[0])  # patches the class; this process trains one model only
        self._optimizer = optim.AdamW(
            learning_rate=0.0, betas=[0.9, 0.999], eps=1e-8, weight_decay=weight_decay, bias_correction=True
        )
        self._optimizer.init(self._model.trainable_parameters())
        self._value_and_grad = nn.value_and_grad(self._model, self._scaled_loss)
        self._model.train()

    def accumulate(self, batch: Batch, step_tokens: int) -> float:
        assert self._value_and_grad is not None
        (_, loss), gradients = self._value_and_grad(self._model, batch, 1.0 / step_tokens)
        self._gradients = gradients if self._gradients is None else tree_map(mx.add, self._gradients, gradients)
        mx.eval(loss, self._gradients)
        return float(loss.item())

    def update(self, learning_rate: float, max_grad_norm: float) -> float:
        gradients, norm = optim.clip_grad_norm(self._gradients, max_grad_norm or float("inf"))
        self._optimizer.learning_rate = learning_rate
        self._optimizer.update(self._model, gradients)
        self._gradients = None
        mx.eval(self._model.trainable_parameters(), self._optimizer.state, norm)
        return float(norm.item())

    def loss_sum(self, batch: Batch) -> float:
        self._model.eval()
        _, loss = self._scaled_loss(self._model, batch, 1.0)
        value = float(loss.item())
        self._model.train()
        return value

    def logits(self, batch: Batch) -> np.ndarray:
        self._model.eval()
        logits, _ = self._trainable_logits(self._model, batch)
        chosen = np.array(logits.astype(mx.float32))
        self._model.train()
        return chosen

    def _scaled_loss(self, model: Any, batch: Batch, scale: float) -> tuple[Any, Any]:
        """(loss sum x scale, loss sum) over the trainable targets."""
        logits, targets = self._trainable_logits(model, batch)
        total = nn.losses.cross_entropy(logits.astype(mx.float32), targets, reduction="sum")
        return total * scale, total

    def _trainable_logits(self, model: Any, batch: Batch) -> tuple[Any, Any]:
        """Logits [trainable tokens, vocabulary] and their targets [trainable tokens].

        The output layer is by far the widest; it is computed only where a token is trained, when the model lets us.
        """
        line, column = np.nonzero(batch.trainable[:, 1:])
        rows, columns = mx.array(line), mx.array(column)
        inputs = mx.array(batch.tokens[:, :-1])
        targets = mx.array(batch.tokens[:, 1:][line, column])
        if self._head is not None:
            return self._head(model.model(inputs)[rows, columns]), targets
        return model(inputs)[rows, columns], targets

    def save_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(
            str(folder / "adapters.safetensors"), dict(sorted(tree_flatten(self._model.trainable_parameters())))
        )
        text = json.dumps(self._config, indent=2, sort_keys=True) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"adapter.{name}": p for name, p in tree_flatten(self._model.trainable_parameters())}
        tensors |= {f"optimizer.{name}": p for name, p in tree_flatten(self._optimizer.state)}
        mx.save_safetensors(str(folder / "state.safetensors"), tensors)

    def load_state(self, folder: Path) -> None:
        tensors: Any = mx.load(str(folder / "state.safetensors"))

        def part(prefix: str) -> list[tuple[str, Any]]:
            return [(name.removeprefix(prefix), value) for name, value in tensors.items() if name.startswith(prefix)]

        self._model.update(tree_unflatten(part("adapter.")))
        self._optimizer.state = tree_unflatten(part("optimizer."))
        mx.eval(self._model.parameters(), self._optimizer.state)

    def memory(self) -> FrameworkMemory:
        return FrameworkMemory(mx.get_active_memory(), mx.get_peak_memory(), 0, "mlx allocator")


def _output_head(model: Any) -> Callable[[Any], Any] | None:
    """The layer from hidden states to logits, when the model is `model.model` followed by just that; else None.

    Proven on one short input rather than believed: some architectures scale or cap their logits.
    """
    inner = getattr(model, "model", None)
    if inner is None or not callable(inner):
        return None
    head = model["lm_head"] if "lm_head" in model else getattr(getattr(inner, "embed_tokens", None), "as_linear", None)
    if head is None:
        return None
    probe = mx.array([[1, 2, 3]])
    whole, parts = model(probe), head(inner(probe))
    same = whole.shape == parts.shape and bool(mx.allclose(whole, parts, rtol=1e-4, atol=1e-4).item())
    return head if same else None


def _is_linear(part: Any) -> bool:
    return isinstance(part, (nn.Linear, nn.QuantizedLinear))


def _logical_size(part: Any) -> int:
    """Parameters of one module itself, counted as weights, not as packed words."""
    if isinstance(part, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return int(part.weight.size * 32 // part.bits) + (int(part.bias.size) if "bias" in part else 0)
    return sum(value.size for value in part.values() if isinstance(value, mx.array))


def _device() -> str:
    return "metal" if mx.metal.is_available() else str(mx.default_device().type).split(".")[-1].lower()


def _wire_memory() -> None:
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


@dataclass(frozen=True)
class ConvertJob:
    """A base folder to be written with quantized weights, in groups of 64."""

    source: str
    folder: str
    bits: int


def convert(job: ConvertJob, emit: Callable[..., None]) -> dict[str, Any]:
    """Write a quantized copy of a base, with float32 scales, through mlx-lm's converter.

    Raises:
        Refusal: `quantization_unavailable` when the base's widths do not divide by the group size.
    """
    import shutil
    import tempfile

    from mlx_lm import convert as mlx_convert

    emit("phase", name="convert", total=0)
    folder = Path(job.folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        # On a CPU, bfloat16 scales make the product about ten times slower; on a Mac the folder's own type is right.
        dtype = None if mx.metal.is_available() else "float32"
        try:
            mlx_convert(
                job.source, str(scratch / "out"), quantize=True, q_bits=job.bits, q_group_size=_GROUP_SIZE, dtype=dtype
            )
        except ValueError as error:
            raise Refusal(
                "quantization_unavailable",
                f"mlx-lm cannot quantize this base: {str(error)[:160]}",
                f"base.quantization: {job.bits}bit",
                "use base.quantization: none",
            ) from None
        # mlx-lm passes over layers whose width does not divide, and says so nowhere.
        if not any(name.endswith(".scales") for name in _tensor_names(scratch / "out")):
            raise Refusal(
                "quantization_unavailable",
                f"no layer of this base has a width that divides into groups of {_GROUP_SIZE}",
                f"base.quantization: {job.bits}bit",
                "use base.quantization: none",
            )
        if not (folder / "config.json").is_file():
            (scratch / "out").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"folder": str(folder)}


def _tensor_names(folder: Path) -> list[str]:
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        tensors: Any = mx.load(str(file))
        names += tensors
    return names
