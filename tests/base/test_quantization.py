"""One word for how a base's weights are stored, whatever format says so."""

import json

import pytest

from lemon_mlflow.base.quantization import Quantization, declared_quantization


@pytest.mark.parametrize(
    ("quantization", "fingerprint"),
    [
        (Quantization(), "none-float32"),
        (Quantization(compute_dtype="bfloat16"), "none-bfloat16"),
        (Quantization("nf4", 4, 64, double=True, compute_dtype="bfloat16"), "nf4-4bit-g64-double-bfloat16"),
        (Quantization("nf4", 4, 64, compute_dtype="float16"), "nf4-4bit-g64-float16"),
        (Quantization("affine", 8, 64), "affine-8bit-g64-float32"),
    ],
)
def test_the_fingerprint_names_method_bits_group_and_type(quantization, fingerprint):
    assert quantization.fingerprint == fingerprint
    assert json.loads(json.dumps(quantization.to_json()))["fingerprint"] == fingerprint


def test_every_field_of_a_quantized_base_changes_the_fingerprint():
    """A11"""
    prints = {
        Quantization("nf4", 4, 64, True, "bfloat16").fingerprint,
        Quantization("fp4", 4, 64, True, "bfloat16").fingerprint,
        Quantization("nf4", 8, 64, True, "bfloat16").fingerprint,
        Quantization("nf4", 4, 32, True, "bfloat16").fingerprint,
        Quantization("nf4", 4, 64, False, "bfloat16").fingerprint,
        Quantization("nf4", 4, 64, True, "float16").fingerprint,
    }
    assert len(prints) == 6


MLX = {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Quantization(compute_dtype="float16")),
        ({"quantization": None}, Quantization(compute_dtype="float16")),
        ({"quantization": {"group_size": 32, "bits": 8}}, Quantization("affine", 8, 32, False, "float16")),
        ({"quantization": MLX, "quantization_config": MLX}, Quantization("affine", 4, 64, False, "float16")),
        ({"quantization_config": {**MLX, "quant_method": "mlx"}}, Quantization("affine", 4, 64, False, "float16")),
        ({"quantization": {**MLX, "mode": "mxfp4"}}, Quantization("mxfp4", 4, 64, False, "float16")),
        (
            {
                "quantization_config": {
                    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                    "bnb_4bit_use_double_quant": True,
                }
            },
            Quantization("nf4", 4, 64, True, "float16"),
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            Quantization("fp4", 4, 64, False, "float16"),
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            Quantization("bitsandbytes", 8, 0, False, "float16"),
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            Quantization("gptq", 4, 128, False, "float16"),
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, Quantization("fp8", 8, 0, False, "float16")),
    ],
)  # fmt: skip
def test_what_a_base_declares_is_read_from_both_libraries_configs(config, expected):
    assert declared_quantization(config, "float16") == expected
