"""Ray Train: python examples/cluster/ray_train.py my.toml /shared/runs/big

Ray starts the processes and makes their group; foretrain finds it. After a failure Ray calls the same function again,
and it goes on from the newest checkpoint of the run folder, which all machines share.
"""

import sys

import foretrain


def train_loop_per_worker(settings):
    loaded = foretrain.load(settings["config"])
    foretrain.train(loaded.config, settings["out"], resume=True, progress="normal")


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"config": sys.argv[1], "out": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=16, use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
