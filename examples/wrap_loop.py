"""A loop of your own, with your own optimizer and scheduler, that foretrain watches and leaps in."""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import foretrain

EPOCHS = 11
torch.manual_seed(0)
inputs = torch.randn(2048, 8)
targets = inputs.sin().sum(1, keepdim=True)
held_out = [(inputs[:256], targets[:256])]  # never trained on
loader = DataLoader(TensorDataset(inputs[256:], targets[256:]), batch_size=64, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

with foretrain.wrap(
    model, optimizer, probe=held_out, loss_fn=mse_loss, max_steps=EPOCHS * len(loader), scheduler=scheduler
) as hybrid:
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            hybrid.between_steps(loss)  # the only place where a leap may change the weights
print(f"held-out loss {hybrid.summary()['final_val_loss']:.3f}; {hybrid.summary()['audit']['sentence']}")
