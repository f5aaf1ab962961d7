"""transformers + peft (+ bitsandbytes): LoRA and QLoRA on CUDA and on the CPU.

Tested on the CPU: float32, bfloat16, and NF4 with double quantization. The CUDA and MPS branches follow the documented
API and are thin; they have not been run by the tests.

bitsandbytes 0.50 on CPUs with AVX512-BF16 repacks the 4-bit weights at the first evaluation-mode forward, and no gradient
passes them afterwards, while the loss still falls. `_keep_gradients_through_nf4` turns that path off, and
`_check_nf4_gradient` proves it in every run.
"""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from ..base.quantization import Quantization, declared_quantization
from ..data.batches import Batch
from ..errors import Failure, Refusal
from .allocator import AllocatorPeak
from .interface import AdapterInfo, FrameworkMemory, LoadedBase, LoadSpec, LoraSpec, initial_lora_a, pick_targets

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# float16 gradients of a mean loss underflow; they are computed this much larger and divided again before clipping.
_FLOAT16_SCALE = 1024.0


def open() -> HfBackend:
    """A backend on the best device of this machine."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("error", message=".*autograd kernel was not registered.*")
    return HfBackend()


class HfBackend:
    """One causal language model with one LoRA adapter; see `interface.Backend` for what each method means."""

    def __init__(self) -> None:
        self.device = _best_device()
        self._allocator = AllocatorPeak() if self.device.type == "cpu" else None
        self._model: Any = None
        self._spec: LoadSpec | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._keeps_logits = False
        self._mps_peak = 0
        self._scale = 1.0

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def load_base(self, spec: LoadSpec) -> LoadedBase:
        dtype = _compute_dtype(spec.dtype, self.device)
        config = json.loads((Path(spec.folder) / "config.json").read_text(encoding="utf-8"))
        options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": False}
        quantization = declared_quantization(config, str(dtype).removeprefix("torch."))
        if spec.quantization == "4bit":
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
            quantization = Quantization("nf4", 4, 64, True, str(dtype).removeprefix("torch."))
        if self.device.type != "cpu":
            options["device_map"] = {"": self.device}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(spec.folder, **options)
        self._model.config.use_cache = False
        self._model.requires_grad_(False)
        self._model.name_or_path = spec.name  # what peft writes into the adapter
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._spec = spec
        self._scale = _FLOAT16_SCALE if dtype == torch.float16 else 1.0
        if quantization.method in ("nf4", "fp4"):
            _keep_gradients_through_nf4(self._model)
            _check_nf4_gradient(self._model, self.device, dtype)
        _, layers = _decoder_layers(self._model)
        return LoadedBase(quantization, self.device.type, len(layers))

    def add_adapter(self, spec: LoraSpec, seed: int) -> AdapterInfo:
        assert self._spec is not None
        list_name, layers = _decoder_layers(self._model)
        linear = sorted(
            {name for layer in layers for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)}
        )
        targets = pick_targets(spec.target_modules, linear)
        count = len(layers) if spec.layers < 0 else spec.layers
        if count > len(layers):
            raise Refusal(
                "too_many_layers",
                f"the base has {len(layers)} decoder layers",
                f"lora.layers: {count}",
                f"use -1, or a number up to {len(layers)}",
            )
        chosen = list(range(len(layers) - count, len(layers)))
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=targets,
            layers_to_transform=None if count == len(layers) else chosen,
            layers_pattern=None if count == len(layers) else list_name.split(".")[-1],
            base_model_name_or_path=self._spec.name,
            revision=self._spec.commit or None,
        )
        self._model = get_peft_model(self._model, config)
        modules = []
        for name, part in self._model.named_modules():
            if hasattr(part, "lora_A") and "default" in part.lora_A:
                inner = name.split(f"{list_name.split('.')[-1]}.", 1)[1]
                weight = part.lora_A["default"].weight
                start = initial_lora_a(seed, inner, spec.rank, weight.shape[1])
                weight.data.copy_(torch.from_numpy(start))
                modules.append(inner)
        trainable = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        return AdapterInfo(trainable, _parameter_count(self._model), tuple(modules))

    def load_adapter(self, folder: Path) -> None:
        stored = load_file(folder / "adapter_model.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._model = PeftModel.from_pretrained(self._model, str(folder), is_trainable=False)
            except RuntimeError as error:  # torch's word for a tensor of another shape
                raise Failure(
                    "adapter_incomplete",
                    f"peft refuses the adapter: {str(error).splitlines()[-1].strip()[:200]}",
                    "adapter/adapter_model.safetensors",
                    "train again; do not use this adapter",
                ) from None
        # peft only warns of missing tensors, and takes surplus ones in silence.
        present = {
            name.replace(".default.", "."): tuple(p.shape)
            for name, p in self._model.named_parameters()
            if ".lora_" in name
        }
        given = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        _refuse_other_tensors(present, given)

    def prepare_training(self, checkpointing: bool, weight_decay: float) -> None:
        if checkpointing:
            _enable_checkpointing(self._model)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
        self._model.train()

    def accumulate(self, batch: Batch, step_tokens: int) -> float:
        loss = self._loss_sum(batch)
        (loss * (self._scale / step_tokens)).backward()
        return float(loss.detach())

    def update(self, learning_rate: float, max_grad_norm: float) -> float:
        assert self._optimizer is not None
        parameters = self._optimizer.param_groups[0]["params"]
        if self._scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def loss_sum(self, batch: Batch) -> float:
        with self._evaluating():
            return float(self._loss_sum(batch))

    def logits(self, batch: Batch) -> np.ndarray:
        with self._evaluating():
            logits, _ = self._trainable_logits(batch)
            return logits.float().cpu().numpy()

    def save_adapter(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # "auto" would ask the hub whether the vocabulary grew; embeddings are never trained here.
        self._model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        # peft keeps sets, whose order changes from process to process; the adapter's hash must not.
        config = {key: sorted(value) if key == "target_modules" else value for key, value in sorted(config.items())}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def save_state(self, folder: Path) -> None:
        assert self._optimizer is not None
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"adapter.{name}": p.detach().cpu().contiguous() for name, p in self._trainable()}
        for name, parameter in self._trainable():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
        save_file(tensors, folder / "state.safetensors")

    def load_state(self, folder: Path) -> None:
        assert self._optimizer is not None
        tensors = load_file(folder / "state.safetensors")
        for name, parameter in self._trainable():
            parameter.data.copy_(tensors[f"adapter.{name}"])
            self._optimizer.state[parameter] = {
                key: tensors[f"optimizer.{key}.{name}"].to("cpu" if key == "step" else parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }

    def memory(self) -> FrameworkMemory:
        if self.device.type == "cuda":
            return FrameworkMemory(
                torch.cuda.memory_allocated(self.device),
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
                "torch.cuda",
            )
        if self.device.type == "mps":
            # torch counts no peak on MPS; the highest of what was looked at, once a step, stands for it.
            self._mps_peak = max(self._mps_peak, torch.mps.driver_allocated_memory())
            return FrameworkMemory(torch.mps.current_allocated_memory(), self._mps_peak, 0, "torch.mps, once a step")
        assert self._allocator is not None
        return self._allocator.read()

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def _evaluating(self) -> _Evaluating:
        return _Evaluating(self._model)

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        logits, targets = self._trainable_logits(batch)
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def _trainable_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [trainable tokens, vocabulary] and their targets [trainable tokens].

        No attention mask: padding is on the right, and a causal model's tokens never see what comes after them. Where the
        model can, only the columns in which some row has a trainable token go through the output layer.
        """
        tokens = torch.from_numpy(batch.tokens).to(self.device, torch.long)
        mask = torch.from_numpy(batch.trainable[:, 1:]).to(self.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._keeps_logits:
            columns = torch.from_numpy(np.flatnonzero(batch.trainable[:, 1:].any(axis=0))).to(self.device)
            logits = self._model(input_ids=inputs, use_cache=False, logits_to_keep=columns).logits
            mask, targets = mask[:, columns], targets[:, columns]
        else:
            logits = self._model(input_ids=inputs, use_cache=False).logits
        return logits[mask], targets[mask]


class _Evaluating:
    """No dropout and no gradients inside; training mode as before afterwards."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._was_training = model.training
        self._inference = torch.no_grad()

    def __enter__(self) -> None:
        self._model.eval()
        self._inference.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inference.__exit__(*error)
        self._model.train(self._was_training)


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32


def _decoder_layers(model: Any) -> tuple[str, Any]:
    """Name and module of the longest list of layers, which in a causal language model is the decoder."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    if not lists:
        raise Refusal(
            "unsupported_architecture",
            "no list of decoder layers was found in the base",
            "base.model",
            "use a decoder-only model such as Llama, Qwen, Mistral, Gemma or SmolLM",
        )
    return max(lists, key=lambda item: len(item[1]))


def _parameter_count(model: Any) -> int:
    """Parameters of base and adapter; a 4-bit tensor holds two in each byte."""
    total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += state.shape.numel() if state is not None else parameter.numel()
    return total


def _enable_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable()
    # Checkpointed layers need an input with a gradient, and below the first adapter nothing has one.
    model.enable_input_require_grads()


def _refuse_other_tensors(present: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]]) -> None:
    wrong = sorted(set(present) ^ set(given)) or sorted(name for name in present if present[name] != given[name])
    if wrong:
        raise Failure(
            "adapter_incomplete",
            f"{len(wrong)} tensors are missing, surplus or of another shape, the first is {wrong[0]}",
            "adapter/adapter_model.safetensors",
            "train again; do not use this adapter",
        )


def _nf4_layers(model: Any) -> list[Any]:
    import bitsandbytes as bnb

    return [part for part in model.modules() if isinstance(part, bnb.nn.Linear4bit)]


def _keep_gradients_through_nf4(model: Any) -> None:
    for layer in _nf4_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _check_nf4_gradient(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Compare the gradient through one 4-bit layer, after an evaluation-mode forward, with its dequantized weights.

    Raises:
        Failure: `quantized_gradient_broken`.
    """
    import bitsandbytes.functional as bnb_functional

    layer = next(iter(_nf4_layers(model)))
    weight = bnb_functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, 4, weight.shape[1], generator=generator).to(device, dtype)
    direction = torch.randn(1, 4, weight.shape[0], generator=generator).to(device, dtype)
    was_training = layer.training
    layer.eval()
    with torch.no_grad():
        layer(probe)
    layer.train(was_training)
    probe.requires_grad_(True)
    (layer(probe) * direction).sum().backward()
    expected = direction.float() @ weight
    found = probe.grad
    cosine = 0.0 if found is None else float(F.cosine_similarity(found.float().flatten(), expected.flatten(), dim=0))
    if not cosine >= 0.99:
        raise Failure(
            "quantized_gradient_broken",
            f"the gradient through the 4-bit layers is wrong (cosine {cosine:.3f}, 0.99 is needed)",
            "base.quantization: 4bit",
            "use another bitsandbytes version, or base.quantization: none",
        )
