"""The peer of `overhead.py`: LoRA training as one writes it by hand with torch, transformers and peft. Nothing of ours.

    python _bare_hf.py work.json          # prints {"began": [...], "losses": [...], "tokens": [...]}

`began` is when each step began, and last when the last one ended (seconds of `time.perf_counter`). The batches are ready in
memory before that; nothing is logged, sampled or saved.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model


def main(work_file: str) -> None:
    work = json.loads(Path(work_file).read_text(encoding="utf-8"))
    with np.load(work["batches"]) as stored:
        steps = [
            [(torch.from_numpy(stored[f"{name}_tokens"]).long(), stored[f"{name}_trainable"]) for name in names]
            for names in work["steps"]
        ]
    torch.manual_seed(work["seed"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(work["base"], dtype=torch.float32)
    model = get_peft_model(
        model.to(device),
        LoraConfig(
            r=work["rank"],
            lora_alpha=work["alpha"],
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=work["linear"],
        ),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=work["learning_rate"], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    model.train()

    losses, tokens, began = [], [], []
    for micro in steps:
        began.append(time.perf_counter())
        step_tokens = sum(int(trainable[:, 1:].sum()) for _, trainable in micro)
        loss_sum = 0.0
        for batch, trainable in micro:
            batch = batch.to(device)
            columns = torch.from_numpy(np.flatnonzero(trainable[:, 1:].any(axis=0))).to(device)
            mask = torch.from_numpy(trainable[:, 1:]).to(device)[:, columns]
            logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=columns).logits
            loss = F.cross_entropy(logits[mask], batch[:, 1:][:, columns][mask], reduction="sum")
            (loss / step_tokens).backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, work["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum / step_tokens)
        tokens.append(step_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began.append(time.perf_counter())
    print(json.dumps({"began": began, "losses": losses, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
