"""How a base's weights are stored and computed with, as one comparable value.

An adapter learned on one quantization is another adapter on another one; so the fingerprint is logged as the tag
`lemon.base.quantization` and compared wherever an adapter is loaded.

    Quantization("nf4", 4, 64, double=True, compute_dtype="bfloat16").fingerprint
    # 'nf4-4bit-g64-double-bfloat16'
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Quantization:
    """A quantization, or its absence.

    Attributes:
        method: `none`, `nf4`, `affine`, or what the base's own config calls it.
        bits: bits a weight; 0 when the method is `none`.
        group_size: weights that share a scale (bitsandbytes says block size); 0 when not grouped.
        double: whether the scales are quantized again.
        compute_dtype: the type that the products are computed in.
    """

    method: str = "none"
    bits: int = 0
    group_size: int = 0
    double: bool = False
    compute_dtype: str = "float32"

    @property
    def fingerprint(self) -> str:
        """One word that is equal exactly when two quantizations are."""
        if self.method == "none":
            return f"none-{self.compute_dtype}"
        double = "-double" if self.double else ""
        return f"{self.method}-{self.bits}bit-g{self.group_size}{double}-{self.compute_dtype}"

    def to_json(self) -> dict[str, Any]:
        """JSON types, with the fingerprint."""
        return {**asdict(self), "fingerprint": self.fingerprint}


def declared_quantization(config: dict[str, Any], compute_dtype: str) -> Quantization:
    """What a base folder's `config.json` says about its own weights.

    mlx-lm writes `quantization` (bits, group_size, mode); transformers writes `quantization_config`.
    """
    own = config.get("quantization") or config.get("quantization_config")
    if not isinstance(own, dict):
        return Quantization(compute_dtype=compute_dtype)
    if "quant_method" not in own or own.get("quant_method") == "mlx":
        return Quantization(
            str(own.get("mode", "affine")), int(own["bits"]), int(own.get("group_size", 64)), False, compute_dtype
        )
    if own.get("load_in_4bit"):
        kind = str(own.get("bnb_4bit_quant_type", "fp4"))
        return Quantization(kind, 4, 64, bool(own.get("bnb_4bit_use_double_quant")), compute_dtype)
    return Quantization(
        str(own["quant_method"]), int(own.get("bits", 8)), int(own.get("group_size", 0) or 0), False, compute_dtype
    )
