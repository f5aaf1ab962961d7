"""The peer of `overhead.py`: LoRA training as one writes it by hand with mlx and mlx-lm. Nothing of ours.

    python _bare_mlx.py work.json          # prints {"began": [...], "losses": [...], "tokens": [...]}

`began` is when each step began, and last when the last one ended (seconds of `time.perf_counter`). The batches are ready in
memory before that; nothing is logged, sampled or saved.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def main(work_file: str) -> None:
    work = json.loads(Path(work_file).read_text(encoding="utf-8"))
    with np.load(work["batches"]) as stored:
        steps = [[(stored[f"{name}_tokens"], stored[f"{name}_trainable"]) for name in names] for names in work["steps"]]
    mx.random.seed(work["seed"])
    model, _ = load_model(Path(work["base"]))
    model.freeze()
    keys = [name for name, part in model.layers[0].named_modules() if name.split(".")[-1] in work["linear"]]
    scale = work["alpha"] / work["rank"]
    linear_to_lora_layers(
        model, len(model.layers), {"rank": work["rank"], "scale": scale, "dropout": 0.0, "keys": keys}
    )
    optimizer = optim.AdamW(
        learning_rate=work["learning_rate"], betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0, bias_correction=True
    )
    optimizer.init(model.trainable_parameters())
    model.train()
    mx.eval(model.parameters(), optimizer.state)

    def loss_fn(model: Any, batch: np.ndarray, trainable: np.ndarray, step_tokens: int) -> Any:
        line, column = np.nonzero(trainable[:, 1:])
        hidden = model.model(mx.array(batch[:, :-1]))[mx.array(line), mx.array(column)]
        logits = model.model.embed_tokens.as_linear(hidden)
        targets = mx.array(batch[:, 1:][line, column])
        return nn.losses.cross_entropy(logits, targets, reduction="sum") / step_tokens

    value_and_grad = nn.value_and_grad(model, loss_fn)
    losses, tokens, began = [], [], []
    for micro in steps:
        began.append(time.perf_counter())
        step_tokens = sum(int(trainable[:, 1:].sum()) for _, trainable in micro)
        mean, gradients = 0.0, None
        for batch, trainable in micro:
            loss, found = value_and_grad(model, batch, trainable, step_tokens)
            gradients = found if gradients is None else tree_map(mx.add, gradients, found)
            mx.eval(loss, gradients)
            mean += loss.item()
        gradients, _ = optim.clip_grad_norm(gradients, work["max_grad_norm"])
        optimizer.update(model, gradients)
        mx.eval(model.trainable_parameters(), optimizer.state)
        losses.append(mean)
        tokens.append(step_tokens)
    began.append(time.perf_counter())
    print(json.dumps({"began": began, "losses": losses, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
