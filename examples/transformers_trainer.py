"""transformers' Trainer with foretrain's callback, on a tiny model and text made here."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from foretrain.integrations.transformers import HybridCallback

STEPS = 200
text = torch.tensor(list(" ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40)).encode()))
rows = text[: len(text) // 32 * 32].view(-1, 32)
rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
examples = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
shape = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **shape))
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=STEPS,
    per_device_train_batch_size=16,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=examples[128:], eval_dataset=examples[:128])
callback = HybridCallback(probe=64).bind(trainer)  # 64 examples of eval_dataset
trainer.train()
print(callback.run.summary()["audit"]["sentence"])
