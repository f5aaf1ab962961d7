"""Which backend a machine can use, and what both backends share. Imports no framework."""

import platform

import numpy as np
import pytest

from lemon_mlflow.backends import interface
from lemon_mlflow.backends.interface import LoraSpec, choose_backend, initial_lora_a, is_installed, pick_targets
from lemon_mlflow.config import Recipe
from lemon_mlflow.errors import Refusal

LINEAR = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
]  # fmt: skip
ALL = ("transformers", "peft", "torch", "mlx_lm", "mlx", "bitsandbytes")
HF = ("transformers", "peft", "torch")


@pytest.fixture
def pretend(monkeypatch):
    """Makes this machine look like another one with these packages."""

    def to_be(system="Linux", chip="x86_64", installed=ALL):
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: chip)
        monkeypatch.setattr(interface, "is_installed", lambda module: module in installed)

    return to_be


def recipe(backend="auto", quantization="auto") -> Recipe:
    return Recipe.model_validate({"train": {"backend": backend}, "base": {"quantization": quantization}})


def refused(*arguments) -> Refusal:
    with pytest.raises(Refusal) as caught:
        choose_backend(*arguments)
    return caught.value


# Which backend


@pytest.mark.parametrize(
    ("system", "chip", "backend"),
    [("Darwin", "arm64", "mlx"), ("Darwin", "x86_64", "hf"), ("Linux", "aarch64", "hf"), ("Linux", "x86_64", "hf"),
     ("Windows", "AMD64", "hf")],
)  # fmt: skip
def test_auto_is_mlx_on_an_apple_chip_and_hf_elsewhere(pretend, system, chip, backend):
    pretend(system, chip)
    assert choose_backend(recipe(), has_cuda=False) == backend


@pytest.mark.parametrize("backend", ["hf", "mlx"])
@pytest.mark.parametrize(("system", "chip"), [("Darwin", "arm64"), ("Linux", "x86_64")])
def test_a_named_backend_is_taken_on_every_machine_that_has_it(pretend, system, chip, backend):
    pretend(system, chip)
    assert choose_backend(recipe(backend), has_cuda=False) == backend


def test_4_bit_on_hf_is_refused_on_a_mac_with_the_backend_that_can(pretend):
    """Y16"""
    pretend("Darwin", "arm64")
    refusal = refused(recipe("hf", "4bit"), False)
    assert (refusal.code, refusal.where) == ("quantization_unavailable", "base.quantization: 4bit")
    assert "backend=mlx" in refusal.remedy


def test_4_bit_is_mlx_by_itself_on_a_mac_and_runs_on_hf_elsewhere(pretend):
    pretend("Darwin", "arm64")
    assert choose_backend(recipe("auto", "4bit"), has_cuda=False) == "mlx"
    pretend("Linux", "x86_64")
    assert choose_backend(recipe("auto", "4bit"), has_cuda=True) == "hf"
    assert choose_backend(recipe("auto", "4bit"), has_cuda=False) == "hf"


def test_4_bit_on_hf_without_bitsandbytes_is_refused_never_trained_unquantized(pretend):
    """Y16"""
    pretend(installed=HF)
    assert refused(recipe("hf", "4bit"), True).code == "quantization_unavailable"
    assert choose_backend(recipe("hf", "none"), has_cuda=True) == "hf"


def test_8_bit_is_for_mlx_alone(pretend):
    pretend()
    refusal = refused(recipe("hf", "8bit"), True)
    assert (refusal.code, refusal.where) == ("quantization_unavailable", "base.quantization: 8bit")
    assert choose_backend(recipe("mlx", "8bit"), has_cuda=False) == "mlx"


def test_a_missing_backend_names_its_packages_and_the_one_that_is_there(pretend):
    pretend("Darwin", "arm64", installed=HF)
    refusal = refused(recipe(), False)
    assert (refusal.code, refusal.where) == ("backend_not_installed", "train.backend: auto")
    assert refusal.message == "backend mlx needs mlx_lm, mlx"
    assert refusal.remedy == "pip install 'lemon-mlflow[mlx]', or use the installed one: -P backend=hf"


def test_with_no_backend_at_all_only_the_installation_is_advised(pretend):
    pretend(installed=("torch",))
    refusal = refused(recipe(), False)
    assert refusal.message == "backend hf needs transformers, peft"
    assert refusal.remedy == "pip install 'lemon-mlflow[hf]'"


def test_a_module_is_looked_for_without_being_imported():
    assert is_installed("json")
    assert not is_installed("no_such_module_anywhere")
    assert not is_installed("no_such_module_anywhere.inside")


# Which layers


@pytest.mark.parametrize(
    ("wanted", "picked"),
    [
        ((), sorted(LINEAR)),
        (("q_proj",), ["self_attn.q_proj"]),
        (("v_proj", "q_proj"), ["self_attn.q_proj", "self_attn.v_proj"]),
        (("mlp.down_proj",), ["mlp.down_proj"]),
        (("q_proj", "self_attn.q_proj"), ["self_attn.q_proj"]),
    ],
)
def test_targets_are_named_by_their_last_part_or_in_full(wanted, picked):
    assert pick_targets(wanted, LINEAR) == picked


@pytest.mark.parametrize("wanted", [("q_projX",), ("q_proj", "q_projX"), ("proj",), ("attn.q_proj",), ("",)])
def test_a_target_that_matches_nothing_is_refused_even_beside_one_that_does(wanted):
    """A08"""
    with pytest.raises(Refusal) as caught:
        pick_targets(wanted, LINEAR)
    assert (caught.value.code, caught.value.where) == ("target_modules_match_nothing", "lora.target_modules")
    assert caught.value.message.endswith(f"is called {wanted[-1]}")
    assert "q_proj" in caught.value.remedy


def test_a_target_like_nothing_gets_the_whole_list():
    with pytest.raises(Refusal) as caught:
        pick_targets(("zzz",), LINEAR)
    assert all(name in caught.value.remedy for name in LINEAR)


# The first adapter


def test_the_first_values_are_the_same_for_the_same_seed_and_name():
    """S04, S06"""
    first = initial_lora_a(7, "3.self_attn.q_proj", 4, 64)
    np.random.seed(1)  # the global generator must not matter
    assert np.array_equal(first, initial_lora_a(7, "3.self_attn.q_proj", 4, 64))
    assert (first.shape, first.dtype) == ((4, 64), np.float32)


def test_the_first_values_are_these_numbers_on_every_machine():
    found = initial_lora_a(7, "0.self_attn.q_proj", 1, 4)
    assert found.tolist() == [pytest.approx([-0.1761107, -0.4373079, -0.1713959, -0.1943571], abs=1e-6)]


@pytest.mark.parametrize(
    ("seed", "module"), [(8, "3.self_attn.q_proj"), (7, "4.self_attn.q_proj"), (7, "3.self_attn.k_proj")]
)
def test_another_seed_or_module_starts_elsewhere(seed, module):
    """S06"""
    assert not np.array_equal(initial_lora_a(7, "3.self_attn.q_proj", 4, 64), initial_lora_a(seed, module, 4, 64))


def test_the_first_values_are_spread_evenly_over_their_range():
    values = initial_lora_a(7, "0.mlp.up_proj", 64, 256)
    assert np.abs(values).max() <= 1 / 16
    assert values.std() == pytest.approx(1 / 16 / np.sqrt(3), rel=0.02)
    assert abs(values.mean()) < 1e-3


def test_the_scale_is_alpha_over_rank():
    assert LoraSpec(8, 16.0, 0.0, -1, ()).scale == 2.0
