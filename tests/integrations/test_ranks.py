"""The callbacks on two ranks, in the hosts' own DistributedDataParallel: replicas stay equal."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.gloo import results
from torch import nn

from .hosts import LONGEST, WORDS, Heard, examples, sentences, settings, weights


def transformers_run(folder: str, name: str) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from foretrain.events import Moved
    from foretrain.integrations.transformers import HybridCallback

    set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LONGEST, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(
        output_dir=f"{folder}/{name}",
        max_steps=40,
        per_device_train_batch_size=4,
        save_steps=20,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        seed=7,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        logging_steps=1000,
    )
    heard = Heard()
    host = Trainer(model, args, train_dataset=examples(200), eval_dataset=examples(16, seed=2))
    HybridCallback(probe=16, config=settings(), bus=heard.bus, out=f"{folder}/{name}-log").bind(host)
    host.train()
    assert isinstance(host.model_wrapped, nn.parallel.DistributedDataParallel)
    verdicts = [(event.step, event.verdict, event.share) for event in heard.of(Moved)]
    return {"weights": weights(model).tolist(), "moves": verdicts}


def accelerate_run() -> dict[str, Any]:
    from accelerate import Accelerator

    from foretrain.integrations import accelerate as integration

    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True)
    inner = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-4))
    rank, size = accelerator.process_index, accelerator.num_processes

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    held_out = [sentences(16, 2).chunk(size)[rank]]
    run = integration.prepare(
        accelerator, model, optimizer, probe=held_out, loss_fn=loss_fn, config=settings(), max_steps=40
    )
    for batch in sentences(320, 1).split(8):
        loss = loss_fn(model, batch.chunk(size)[rank])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.between_steps(loss)
    run.close()
    return {"weights": weights(inner).tolist(), "moves": run.summary()["moves"]}


def lightning_run() -> dict[str, Any]:
    import lightning
    from torch.utils.data import DataLoader

    from foretrain.integrations.lightning import HybridCallback

    class Counting(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    lightning.seed_everything(7, verbose=False)
    callback = HybridCallback(probe=2, config=settings())
    host = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=40,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    module = Counting()
    host.fit(module, DataLoader(sentences(320, 1), batch_size=4), DataLoader(sentences(32, 2), batch_size=4))
    assert host.world_size == 2
    assert callback.run is not None
    return {"weights": weights(module).tolist(), "moves": callback.run.summary()["moves"]}


def in_two(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the hosts' own
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    os.environ |= meeting  # hosts look for it, and use the group that is there
    return {
        "accelerate": accelerate_run(),
        "whole": transformers_run(folder, "whole"),
        "lightning": lightning_run(),
    }


def test_replicas_stay_equal(tmp_path: Path) -> None:
    one, other = results(2, in_two, str(tmp_path))
    assert one == other
    assert one["accelerate"]["moves"]["kept"] >= 1
    assert one["lightning"]["moves"]["kept"] >= 1
    assert any(verdict == "kept" for _, verdict, _ in one["whole"]["moves"])
    assert (tmp_path / "whole-log" / "report.html").is_file()
    assert (tmp_path / "whole" / "checkpoint-40" / "foretrain" / "manifest.json").is_file()
