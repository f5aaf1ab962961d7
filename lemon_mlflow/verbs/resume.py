"""`train.resume`: fetches another run's checkpoint, and refuses it unless going on would be exact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..config import Recipe, canonical_text, flatten
from ..errors import Refusal

# Where files lie is settled by their hashes; the others change nothing of what is computed.
_MAY_DIFFER = (
    "train.resume",
    "train.checkpoint_every",
    "train.validate_every",
    "train.backend",
    "base.model",
    "base.revision",
    "data.path",
)


def fetch_checkpoint(client: MlflowClient, recipe: Recipe, same: Mapping[str, str], folder: Path) -> Path:
    """The checkpoint of run `recipe.train.resume`, in `folder`.

    Args:
        same: tags that both runs must have with equal values (hashes, backend).

    Raises:
        Refusal: `checkpoint_not_found`, `resume_mismatch`.
    """
    run_id = recipe.train.resume or ""
    where = f"train.resume: {run_id}"
    try:
        run = client.get_run(run_id)
        text = Path(client.download_artifacts(run_id, "recipe.yaml", str(folder))).read_text(encoding="utf-8")
        names = sorted(item.path for item in client.list_artifacts(run_id, "checkpoint") if item.is_dir)
    except (MlflowException, OSError):
        raise Refusal(
            "checkpoint_not_found",
            "there is no such run with a checkpoint",
            where,
            "give the id of a run that had train.checkpoint_every set and was stopped",
        ) from None
    before = flatten(Recipe.model_validate(yaml.safe_load(text)))
    now = flatten(recipe)
    differing = [
        f"{key} ({canonical_text(before.get(key))} then, {canonical_text(now[key])} now)"
        for key in now
        if key not in _MAY_DIFFER
        and key.split(".")[0] in ("base", "data", "lora", "train")
        and before.get(key) != now[key]
    ]
    differing += [f"{tag} differs" for tag, value in same.items() if run.data.tags.get(tag) != value]
    if differing:
        raise Refusal(
            "resume_mismatch",
            f"going on would not be exact: {'; '.join(differing[:5])}",
            where,
            "resume with the recipe, data and base of that run, or start a new run",
        )
    if not names:
        raise Refusal(
            "checkpoint_not_found",
            "that run kept no checkpoint (a completed run keeps none)",
            where,
            "set train.checkpoint_every in the run that may be stopped",
        )
    return Path(client.download_artifacts(run_id, names[-1], str(folder)))
