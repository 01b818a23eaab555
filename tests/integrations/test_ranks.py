"""The callbacks on two ranks, in the hosts' own DistributedDataParallel: replicas stay equal, and leaps are those of
one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gloo import results
from torch import nn

from .hosts import LONGEST, WORDS, Heard, examples, forget_accelerate, sentences, settings, weights


def model_and_arguments(folder: str, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Without dropout, which each rank draws for itself."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(7)
    shape = {"n_positions": LONGEST, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **shape, **still)), {
        "output_dir": folder,
        "max_steps": 40,
        "per_device_train_batch_size": 8 // ranks,
        "save_steps": 20,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "seed": 7,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1000,
        **({"ddp_backend": "gloo"} if ranks > 1 else {}),
    }


def transformers_run(folder: str, ranks: int) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from foretrain.events import Moved
    from foretrain.integrations.transformers import HybridCallback

    model, arguments = model_and_arguments(folder, ranks)
    heard = Heard()
    host = Trainer(
        model, TrainingArguments(**arguments), train_dataset=examples(200), eval_dataset=examples(16, seed=2)
    )
    HybridCallback(probe=16, config=settings(), bus=heard.bus, out=f"{folder}-log").bind(host)
    host.train()
    assert isinstance(host.model_wrapped, nn.parallel.DistributedDataParallel) is (ranks > 1)
    verdicts = [[event.step, event.verdict, event.share] for event in heard.of(Moved)]
    return {"weights": weights(model).tolist(), "moves": verdicts}


def trl_run(folder: str, ranks: int) -> dict[str, Any]:
    """In fp32: bf16, which TRL takes by itself, rounds two halves of a batch otherwise than the whole."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from foretrain.integrations.transformers import HybridCallback

    from .test_transformers import tokenizer

    model, arguments = model_and_arguments(folder, ranks)
    texts = [{"text": " ".join(map(str, row.tolist()))} for row in sentences(100, 1)]
    host = SFTTrainer(
        model,
        args=SFTConfig(
            **arguments | {"learning_rate": 1e-3, "save_strategy": "no", "max_length": LONGEST, "bf16": False}
        ),
        train_dataset=Dataset.from_list(texts[:80]),
        eval_dataset=Dataset.from_list(texts[80:]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    callback = HybridCallback(probe=16, config=settings()).bind(host)
    host.train()
    assert callback.run is not None
    return {"weights": weights(host.model).tolist(), "moves": callback.run.summary()["moves"]}


def accelerate_run() -> dict[str, Any]:
    from accelerate import Accelerator

    from foretrain.integrations import accelerate as integration

    forget_accelerate()
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


def lightning_run(rank: int, ranks: int) -> dict[str, Any]:
    """Each rank takes its rows by itself: Lightning would shuffle them for several ranks, and for one it does not."""
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
    module = Counting()
    callback = HybridCallback(probe=2, config=settings())
    host = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        use_distributed_sampler=False,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=40,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    rows = [sentences(320, 1)[rank::ranks], sentences(32, 2)[rank::ranks]]
    host.fit(module, *(DataLoader(one, batch_size=8 // ranks) for one in rows))
    assert host.world_size == ranks
    assert callback.run is not None
    return {"weights": weights(module).tolist(), "moves": callback.run.summary()["moves"]}


def in_two(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the hosts' own
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    os.environ |= meeting  # hosts look for it, and use the group that is there
    return {
        "accelerate": accelerate_run(),
        "transformers": transformers_run(f"{folder}/two", 2),
        "lightning": lightning_run(rank, 2),
        "trl": trl_run(f"{folder}/trl", 2),
    }


@pytest.mark.filterwarnings("ignore")  # the hosts' own
@pytest.mark.xdist_group("hosts")  # they take seconds to import
def test_replicas_stay_equal_and_leap_as_one_process_does(tmp_path: Path) -> None:
    one, other = results(2, in_two, str(tmp_path))
    assert one == other
    for host in ("accelerate", "lightning", "trl"):
        assert one[host]["moves"]["kept"] >= 1
    assert any(verdict == "kept" for _, verdict, _ in one["transformers"]["moves"])
    assert (tmp_path / "two-log" / "report.html").is_file()
    assert (tmp_path / "two" / "checkpoint-40" / "foretrain" / "manifest.json").is_file()
    alone = {
        "accelerate": accelerate_run(),
        "transformers": transformers_run(str(tmp_path / "one"), 1),
        "lightning": lightning_run(0, 1),
        "trl": trl_run(str(tmp_path / "trl-alone"), 1),
    }
    for host, run in alone.items():
        assert one[host]["moves"] == run["moves"], host
        apart = (torch.tensor(one[host]["weights"]) - torch.tensor(run["weights"])).abs()
        assert float(apart.mean()) < 1e-5, host  # where a gradient is 0 but for rounding Adam goes anywhere
