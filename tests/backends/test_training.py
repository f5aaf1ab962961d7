"""Both backends give one meaning to seed, loss, accumulation, validation and resume. Real models, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lemon_mlflow.data.prepare import load_token_rows
from lemon_mlflow.errors import Failure, Refusal
from lemon_mlflow.provenance.hashes import all_files, manifest_of
from tests.tiny_models import TinyRun, train_tiny

BACKENDS = ("hf", "mlx")
both = pytest.mark.parametrize("backend", BACKENDS)


def adapter_hash(run: TinyRun) -> str:
    return manifest_of(run.adapter, all_files(run.adapter)).sha256


def test_both_backends_see_the_same_rows_and_their_losses_agree_within_one_percent(
    base: Path, tokens: Path, tmp_path: Path
) -> None:
    hf = train_tiny("hf", base, tokens, tmp_path / "hf", train__max_steps=20, train__epochs=9)
    mlx = train_tiny("mlx", base, tokens, tmp_path / "mlx", train__max_steps=20, train__epochs=9)
    assert [step["tokens"] for step in hf.steps] == [step["tokens"] for step in mlx.steps]
    assert len(hf.losses) == len(mlx.losses) == 20
    assert np.allclose(hf.losses, mlx.losses, rtol=0.01)
    assert hf.losses[-1] < 0.8 * hf.losses[0]  # agreement of two runs that learn nothing would show nothing
    for ours, theirs in zip(hf.validations, mlx.validations, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)


@both
def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # S04, S06
    runs = [
        train_tiny(
            backend, base, tokens, tmp_path / str(number), train__max_steps=4, train__seed=seed, lora__dropout=0.1
        )
        for number, seed in enumerate((7, 7, 8))
    ]
    hashes = [adapter_hash(run) for run in runs]
    assert hashes[0] == hashes[1]
    assert hashes[2] != hashes[0]
    assert runs[0].losses == runs[1].losses


@both
def test_accumulation_is_the_same_mean_however_the_rows_are_split(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # S01: labels of different counts, 4 x 1 against 1 x 4
    lengths = [len(row.ids) for row in load_token_rows(tokens, "train")]
    assert len(set(lengths)) > 3
    whole = train_tiny(
        backend, base, tokens, tmp_path / "a", train__batch_size=22, train__gradient_accumulation=1, train__epochs=2
    )
    split = train_tiny(
        backend, base, tokens, tmp_path / "b", train__batch_size=1, train__gradient_accumulation=22, train__epochs=2
    )
    assert len(whole.losses) == len(split.losses) == 2
    assert whole.losses[0] == pytest.approx(split.losses[0], rel=1e-6)
    assert whole.losses[1] == pytest.approx(split.losses[1], rel=1e-4)
    assert whole.steps[0]["grad_norm"] == pytest.approx(split.steps[0]["grad_norm"], rel=1e-5)


@both
def test_the_last_partial_accumulation_is_applied(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # S03
    run = train_tiny(backend, base, tokens, tmp_path / "a", train__batch_size=2, train__gradient_accumulation=3)
    assert len(run.losses) == 4  # 22 rows are 11 micro-batches: 3 + 3 + 3 + 2
    rows = load_token_rows(tokens, "train")
    assert sum(step["tokens"] for step in run.steps) == sum(row.trainable_tokens for row in rows)


@both
def test_validation_uses_all_rows_before_the_first_step_and_after_the_last(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # D09
    run = train_tiny(
        backend, base, tokens, tmp_path / "a", train__max_steps=3, train__validate_every=2, train__batch_size=4
    )
    assert [event["step"] for event in run.validations] == [0, 2, 3]
    rows = load_token_rows(tokens, "valid")
    assert len(rows) % 4 != 0
    for event in run.validations:
        assert event["tokens"] == sum(row.trainable_tokens for row in rows)
    one_by_one = train_tiny(backend, base, tokens, tmp_path / "b", train__max_steps=1, train__batch_size=1)
    assert one_by_one.validations[0]["loss"] == pytest.approx(run.validations[0]["loss"], rel=1e-5)


@both
def test_resuming_gives_the_losses_of_an_unbroken_run(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # S07, S08
    keys = {"train__max_steps": 8, "train__epochs": 9, "lora__dropout": 0.2, "train__warmup_steps": 3}
    unbroken = train_tiny(backend, base, tokens, tmp_path / "a", train__checkpoint_every=4, **keys)
    checkpoint = tmp_path / "a" / "checkpoint-00000004"
    resumed = train_tiny(backend, base, tokens, tmp_path / "b", resume_from=str(checkpoint), **keys)
    assert [step["step"] for step in resumed.steps] == [5, 6, 7, 8]
    assert resumed.losses == unbroken.losses[4:]
    assert adapter_hash(resumed) == adapter_hash(unbroken)


@both
def test_checkpointing_changes_no_loss(backend: str, base: Path, tokens: Path, tmp_path: Path) -> None:
    # mlx-lm patches the layer class for good, so the run with checkpointing has a process of its own.
    plain = train_tiny(backend, base, tokens, tmp_path / "a", train__max_steps=4)
    code = (
        "import sys, json; from pathlib import Path; from tests.tiny_models import train_tiny;"
        "run = train_tiny(sys.argv[1], *map(Path, sys.argv[2:5]), train__max_steps=4, train__gradient_checkpointing=True);"
        "print(json.dumps(run.losses))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, backend, str(base), str(tokens), str(tmp_path / "b")],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(plain.losses, rel=1e-5)


@both
def test_only_the_last_layers_are_adapted(backend: str, base: Path, tokens: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    run = train_tiny(
        backend,
        base,
        tokens,
        tmp_path / "a",
        train__max_steps=1,
        lora__layers=1,
        lora__target_modules="q_proj,down_proj",
    )
    file = "adapter_model.safetensors" if backend == "hf" else "adapters.safetensors"
    names = set(load_file(run.adapter / file))
    assert len(names) == 4
    assert all("layers.3." in name for name in names)


@both
def test_a_target_that_matches_nothing_is_refused_with_near_names(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # A08, A09
    for target in ("q_projX", "embed_tokens"):
        with pytest.raises(Refusal) as caught:
            train_tiny(backend, base, tokens, tmp_path / "a", lora__target_modules=target)
        assert caught.value.code == "target_modules_match_nothing"
    with pytest.raises(Refusal, match="q_proj"):
        train_tiny(backend, base, tokens, tmp_path / "a", lora__target_modules="q_projX")
    with pytest.raises(Refusal) as caught:
        train_tiny(backend, base, tokens, tmp_path / "a", lora__layers=5)
    assert caught.value.code == "too_many_layers"


@both
def test_a_loss_that_is_not_finite_stops_the_run(
    backend: str, base: Path, tokens: Path, tmp_path: Path
) -> None:  # S10, K08
    with pytest.raises(Failure) as caught:
        train_tiny(
            backend,
            base,
            tokens,
            tmp_path / "a",
            train__learning_rate=1e30,
            train__max_grad_norm=0,
            train__schedule="constant",
        )
    assert caught.value.code in ("non_finite_loss", "non_finite_gradient")
    assert not (tmp_path / "a" / "adapter").exists()


@both
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora__rank", 2), ("lora__alpha", 3.0), ("lora__dropout", 0.5), ("lora__layers", 2), ("lora__target_modules", "q_proj"),
        ("train__seed", 8), ("train__batch_size", 1), ("train__gradient_accumulation", 1), ("train__learning_rate", 5e-3),
        ("train__schedule", "cosine"), ("train__warmup_steps", 2), ("train__weight_decay", 0.5), ("train__max_grad_norm", 0.01),
        ("base__dtype", "bfloat16"),
    ],
)  # fmt: skip
def test_each_setting_reaches_the_backend(
    backend: str, key: str, value: object, base: Path, tokens: Path, tmp_path: Path
) -> None:  # Y18
    plain = train_tiny(backend, base, tokens, tmp_path / "a", train__max_steps=4)
    changed = train_tiny(backend, base, tokens, tmp_path / "b", train__max_steps=4, **{key: value})
    assert changed.losses != plain.losses


@both
def test_the_adapter_loads_without_this_package(backend: str, base: Path, tokens: Path, tmp_path: Path) -> None:
    run = train_tiny(backend, base, tokens, tmp_path / "a", train__max_steps=4)
    if backend == "hf":
        code = (
            "import sys, torch; from transformers import AutoModelForCausalLM; from peft import PeftModel\n"
            "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); x = torch.tensor([[3, 9, 8, 7]])\n"
            "before = m(x).logits.detach().clone(); p = PeftModel.from_pretrained(m, sys.argv[2]).eval()\n"
            "assert not torch.equal(before, p(x).logits); assert 'lemon_mlflow' not in sys.modules; print('loaded')"
        )
        command = [sys.executable, "-c", code, str(base), str(run.adapter)]
    else:
        command = [sys.executable, "-m", "mlx_lm", "generate", "--model", str(base), "--adapter-path", str(run.adapter),
                   "--prompt", "Tell me", "--max-tokens", "3"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=_offline())
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("loaded" if backend == "hf" else "Generation: 3 tokens") in done.stdout


def _offline() -> dict[str, str]:
    import os

    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
