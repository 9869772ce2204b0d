"""Log to MLflow: `--mlflow`. Only this file imports the package.

sink = MLflow(folder, "digits", where="outputs/digits", resume_step=500)
sink.start(info)
sink.log({"global_step": 510, "running_loss": 2.5})

The server is $MLFLOW_TRACKING_URI, else a SQLite file in the run's folder; the experiment is $MLFLOW_EXPERIMENT_NAME,
else lockstep.
"""

import logging
import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any, final

from lockstep.config.secrets import mask

__all__ = [
    "MLflow",
]

_FINISH_TIMEOUT = 120.0  # seconds to wait for the server at the end of a run
_RUN_TAG = "lockstep.run"  # by which a resumed run finds its MLflow run
_MOST_PARAMS, _MOST_CHARACTERS = 100, 500  # of a batch, and of a value; what every server takes


@final
class MLflow:
    """Sink for a run of MLflow that a resume continues.

    A thread talks to the server, so that a slow one delays nothing. A later `log`, or `close`, raises its errors.
    Records of steps that run again after a resume are logged again, with the same numbers.

    Args:
        folder: the run's.
        experiment: the run's name.
        where: SAVE_DIR/EXPERIMENT_NAME; a resume looks for the MLflow run with this tag.
        resume_step: steps trained before; above 0 the run with the tag goes on, if there is one.
    """

    def __init__(self, folder: Path, experiment: str, *, where: str, resume_step: int = 0) -> None:
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._experiment, self._where, self._resume_step = experiment, mask(where), resume_step
        self._artifacts = (folder / "mlflow").absolute().as_uri()
        self._queue: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()  # records, then a status
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, info: dict[str, Any]) -> None:
        """Start or resume the run, with `info` as its parameters, from a thread.

        Raises:
            ImportError: the package is missing.
        """
        from mlflow import MlflowClient  # imported here, since loader processes may fork while the thread works

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._thread = threading.Thread(target=self._work, args=(MlflowClient, info), daemon=True, name="mlflow")
        self._thread.start()

    def log(self, record: dict[str, Any]) -> None:
        """Queue the record's numbers.

        Raises:
            Exception: an earlier error of the server.
        """
        self._queue.put({name: value for name, value in record.items() if not isinstance(value, str | None)})
        self._raise_error()

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run, as failed without a summary. Waits two minutes at most.

        Raises:
            TimeoutError: the server did not take all records in time.
            Exception: an error of the server.
        """
        if self._thread is None:
            return
        self._queue.put("FAILED" if summary is None else "FINISHED")
        self._thread.join(_FINISH_TIMEOUT)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not take all records within {_FINISH_TIMEOUT:.0f} s")

    def _raise_error(self) -> None:
        if error := self._error:
            self._error = None
            raise error

    def _work(self, client_type: Any, info: dict[str, Any]) -> None:
        try:
            client = client_type(tracking_uri=self._uri)
            run = self._open(client, info)
        except Exception as error:  # any error of a third party's service
            self._error = error
            return
        while not isinstance(item := self._queue.get(), str):
            try:
                client.log_batch(run, metrics=_metrics(item))
            except Exception as error:  # the next record may get through
                self._error = error
        try:
            client.set_terminated(run, status=item)
        except Exception as error:
            self._error = error

    def _open(self, client: Any, info: dict[str, Any]) -> str:
        """Return the id of the run to log to."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lockstep"
        found = client.get_experiment_by_name(name)
        local = {"artifact_location": self._artifacts} if self._uri.startswith("sqlite:") else {}
        experiment = found.experiment_id if found else client.create_experiment(name, **local)
        if self._resume_step:
            where = self._where.replace("'", "")
            earlier = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{where}'", max_results=1)  # the newest
            if earlier:
                client.update_run(earlier[0].info.run_id, status="RUNNING")
                return str(earlier[0].info.run_id)
        tags = {_RUN_TAG: self._where.replace("'", "")}
        run = str(client.create_run(experiment, run_name=self._experiment, tags=tags).info.run_id)
        params = _params(info)
        for at in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run, params=params[at : at + _MOST_PARAMS])
        return run


def _name(name: str) -> str:
    """Replace the characters that MLflow takes in no name."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _metrics(record: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    now, step = time.time_ns() // 1_000_000, int(record["global_step"])
    return [Metric(_name(name), float(value), now, step) for name, value in record.items() if name != "global_step"]


def _params(info: dict[str, Any], prefix: str = "") -> list[Any]:
    from mlflow.entities import Param

    params: list[Any] = []
    for name, value in info.items():
        if isinstance(value, dict):
            params += _params(value, "" if name == "args" else f"{prefix}{name}.")
        else:
            params.append(Param(_name(prefix + name), str(value)[:_MOST_CHARACTERS]))
    return params
