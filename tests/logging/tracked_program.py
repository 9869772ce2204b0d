"""A program that trains with MLflow: `tracked_program.py stopped FOLDER`; see test_tracked_runs.py."""

import contextlib
import sys

import mlflow
import small_runs
from toys import Ragged

import lockstep


def settings(folder, **changes):
    values = {"max_steps": 4, "log_freq": 2, "ckpt_freq": 2, "eval_freq": 0, "report": False, "mlflow": True}
    return small_runs.config(folder, **values | changes)


class Broken(Ragged):
    """Fails in step 3."""

    def loss(self, model, batch):
        if self.step > 2:
            raise RuntimeError("broken")
        return super().loss(model, batch)


def main(kind, folder):
    if kind == "stopped":
        lockstep.train(settings(folder, stop_at=2), Ragged())
    elif kind == "whole":
        lockstep.train(settings(folder), Ragged())
    else:
        mlflow.set_experiment("theirs")
        with mlflow.start_run(run_name="mine", tags={"team": "vision"}):
            mlflow.log_param("lr", "mine")
            lockstep.train(settings(folder, experiment_name="active", stop_at=2), Ragged())
            mlflow.log_metric("after", 1.0)
        lockstep.train(settings(folder), Ragged())
        with contextlib.suppress(RuntimeError):
            lockstep.train(settings(folder, experiment_name="broken"), Broken())


if __name__ == "__main__":
    main(*sys.argv[1:])
