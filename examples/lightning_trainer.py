"""Lightning's Trainer with foretrain's callback, and a loader with which a resumed run is the whole one to the bit."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from foretrain.integrations.lightning import HybridCallback, ResumableLoader


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(2048, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
train, held_out = torch.utils.data.random_split(data, [1792, 256])
callback = HybridCallback(probe=4)  # four batches of the validation loader
saving = ModelCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)  # called again, it goes on from there
trainer = lightning.Trainer(max_steps=300, accelerator="cpu", logger=False, callbacks=[callback, saving])
trainer.fit(Net(), ResumableLoader(train, batch_size=64, seed=1), DataLoader(held_out, batch_size=64), ckpt_path="last")
print(callback.run.summary()["audit"]["sentence"] if callback.run else "all steps were made before")
