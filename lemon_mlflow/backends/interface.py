"""What a backend does, and which backend a machine can use.

    name = choose_backend(recipe)                  # parent process: looks, imports nothing
    backend = open_backend(name)                   # child process: imports the framework

Both backends give each operation the same meaning: the adapter's first values are a function of the seed and the module's
name (`initial_lora_a`, the same numbers on both), a loss is a *sum* over trainable tokens, and gradients of one step are
divided by the step's trainable tokens, over all its micro-batches.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..base.quantization import Quantization
from ..config import Recipe
from ..data.batches import Batch
from ..errors import Refusal


@dataclass(frozen=True)
class LoadSpec:
    """Which base to load, and how.

    Attributes:
        folder: the base's folder.
        name: what adapter files call the base (hub id, folder or `embedded:...`).
        commit: the hub's commit, or "".
        quantization: the recipe's `base.quantization`, with `auto` resolved.
        dtype: the recipe's `base.dtype`.
    """

    folder: str
    name: str
    commit: str
    quantization: str
    dtype: str


@dataclass(frozen=True)
class LoraSpec:
    """The adapter's shape; see `config.LoraSection`. `layers` -1 means all, `target_modules` () means all linear ones."""

    rank: int
    alpha: float
    dropout: float
    layers: int
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What the low-rank product is multiplied with: alpha / rank (Hu et al. 2021, section 4.1)."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoadedBase:
    """What was loaded: its quantization, the device, and the number of decoder layers."""

    quantization: Quantization
    device: str
    layers: int


@dataclass(frozen=True)
class AdapterInfo:
    """What is trained: parameters, all parameters of the model (base and adapter), and the adapted modules."""

    trainable_parameters: int
    total_parameters: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class FrameworkMemory:
    """Bytes as the framework counts them.

    Attributes:
        active: in use now.
        peak: most in use at once, since the process began.
        reserved_peak: most held from the device at once (CUDA), 0 where there is no such figure.
        source: whose count it is.
    """

    active: int
    peak: int
    reserved_peak: int
    source: str


class Backend(Protocol):
    """One model in one process. Loss sums are in nats; token counts are those of `Batch`."""

    def seed(self, seed: int) -> None:
        """Fix what is drawn from now on (dropout)."""

    def load_base(self, spec: LoadSpec) -> LoadedBase:
        """Load the base, frozen."""

    def add_adapter(self, spec: LoraSpec, seed: int) -> AdapterInfo:
        """Put fresh LoRA layers on the base. Raises `Refusal` `target_modules_match_nothing`."""

    def load_adapter(self, folder: Path) -> None:
        """Put a saved adapter on the base. Raises `Failure` `adapter_incomplete` when a tensor is missing or too many."""

    def prepare_training(self, checkpointing: bool, weight_decay: float) -> None:
        """Make the optimizer (AdamW, betas 0.9 and 0.999, eps 1e-8), and turn checkpointing on."""

    def accumulate(self, batch: Batch, step_tokens: int) -> float:
        """Forward and backward; adds the gradient of (loss sum / step_tokens). Returns the loss sum."""

    def update(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clip, step, forget the gradients. Returns their norm before clipping."""

    def loss_sum(self, batch: Batch) -> float:
        """The loss sum without dropout and without gradients."""

    def logits(self, batch: Batch) -> np.ndarray:
        """float32, shape [trainable tokens of the batch, vocabulary], without dropout."""

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in the backend's own format."""

    def save_state(self, folder: Path) -> None:
        """Write adapter and optimizer, so that `load_state` goes on exactly."""

    def load_state(self, folder: Path) -> None:
        """The inverse of `save_state`."""

    def memory(self) -> FrameworkMemory:
        """What the framework holds."""


_MODULES = {"hf": ("transformers", "peft", "torch"), "mlx": ("mlx_lm", "mlx")}


def is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def on_apple_silicon() -> bool:
    """Whether this is a Mac with an Apple chip."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def choose_backend(recipe: Recipe, has_cuda: bool) -> str:
    """The backend of this run: `hf` or `mlx`.

    Args:
        has_cuda: whether an NVIDIA GPU was found.

    Raises:
        Refusal: `backend_not_installed`, `quantization_unavailable`.
    """
    wanted, quantization = recipe.train.backend, recipe.base.quantization
    name = wanted if wanted != "auto" else ("mlx" if on_apple_silicon() else "hf")
    if name == "hf" and quantization == "4bit" and platform.system() == "Darwin" and not has_cuda:
        raise Refusal(
            "quantization_unavailable",
            "4-bit bitsandbytes needs CUDA or a Linux CPU, not a Mac",
            "base.quantization: 4bit",
            "use -P backend=mlx, which has its own 4 bit",
        )
    if name == "hf" and quantization == "8bit":
        raise Refusal(
            "quantization_unavailable",
            "the hf backend trains on none or 4bit (NF4)",
            "base.quantization: 8bit",
            "use base.quantization: 4bit, or -P backend=mlx for 8 bit",
        )
    missing = [module for module in _MODULES[name] if not is_installed(module)]
    if missing:
        other = "mlx" if name == "hf" else "hf"
        also = f", or use the installed one: -P backend={other}" if all(map(is_installed, _MODULES[other])) else ""
        raise Refusal(
            "backend_not_installed",
            f"backend {name} needs {', '.join(missing)}",
            f"train.backend: {wanted}",
            f"pip install 'lemon-mlflow[{name}]'{also}",
        )
    if name == "hf" and quantization == "4bit" and not is_installed("bitsandbytes"):
        raise Refusal(
            "quantization_unavailable",
            "4 bit on hf needs bitsandbytes",
            "base.quantization: 4bit",
            "pip install bitsandbytes, or use base.quantization: none",
        )
    return name


def open_backend(name: str) -> Backend:
    """Import the framework and make a backend. Only in a child process."""
    module: Any = importlib.import_module(f"{__package__}.{name}")
    backend: Backend = module.open()
    return backend


def initial_lora_a(seed: int, module: str, rank: int, inputs: int) -> np.ndarray:
    """First values of LoRA's A, float32, shape [rank, inputs], uniform in +-1/sqrt(inputs).

    peft and mlx-lm both draw from this distribution, each with its own generator; drawing here makes the two backends
    start from the same adapter. `module` is the name inside the decoder, such as `3.self_attn.q_proj`.
    """
    generator = np.random.default_rng([seed, zlib.crc32(module.encode("utf-8"))])
    bound = 1.0 / np.sqrt(inputs)
    return generator.uniform(-bound, bound, size=(rank, inputs)).astype(np.float32)


def refuse_no_target(wanted: tuple[str, ...], linear: list[str]) -> Refusal:
    """What to raise when `lora.target_modules` names a module that is not a linear layer of the decoder."""
    import difflib

    near = sorted({match for name in wanted for match in difflib.get_close_matches(name, linear, 3, cutoff=0.3)})
    return Refusal(
        "target_modules_match_nothing",
        f"no linear layer of the decoder is called {', '.join(wanted)}",
        "lora.target_modules",
        f"the linear layers are: {', '.join(near or linear)}",
    )


def pick_targets(wanted: tuple[str, ...], linear: list[str]) -> list[str]:
    """The linear layers (names inside a decoder layer, such as `self_attn.q_proj`) that `wanted` means; () means all.

    Raises:
        Refusal: `target_modules_match_nothing`.
    """
    if not wanted:
        return sorted(linear)
    unmatched = tuple(name for name in wanted if not any(full == name or full.endswith(f".{name}") for full in linear))
    if unmatched:
        raise refuse_no_target(unmatched, sorted({*linear, *(full.split(".")[-1] for full in linear)}))
    return sorted(full for full in linear if any(full == name or full.endswith(f".{name}") for name in wanted))
