"""A loop with Accelerate that foretrain watches and leaps in; its state rides in save_state and load_state."""

import tempfile

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from foretrain.integrations import accelerate as foretrain_accelerate

torch.manual_seed(0)
inputs = torch.randn(2048, 8)
targets = inputs.sin().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs[256:], targets[256:]), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
hybrid = foretrain_accelerate.prepare(
    accelerator, model, optimizer, probe=[(inputs[:256], targets[:256])], loss_fn=mse_loss, max_steps=280
)
for _ in range(10):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        hybrid.between_steps(loss)
accelerator.save_state(tempfile.mkdtemp())
hybrid.close()
print(hybrid.summary()["audit"]["sentence"])
