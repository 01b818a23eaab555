"""A loop of your own under Optuna, with foretrain's pruner: it asks where a trial will end, not how it stands."""

import optuna
import torch

from foretrain.integrations.optuna import ForecastPruner

STEPS = 200


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("rate", 1e-4, 1.0, log=True))
    data = torch.randn(256, 8)
    for step in range(1, STEPS + 1):
        loss = torch.nn.functional.mse_loss(model(data), data.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.report(loss.item(), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss.item()


study = optuna.create_study(pruner=ForecastPruner(STEPS), sampler=optuna.samplers.RandomSampler(seed=1))
study.optimize(objective, n_trials=12)
print(f"best rate {study.best_params['rate']:.3g} with loss {study.best_value:.4f}")
