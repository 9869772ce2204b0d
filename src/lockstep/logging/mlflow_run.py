"""Log to MLflow: `--mlflow`. Only this file imports the package.

sink = MLflow(folder, "digits", run_id)
sink.start(info)
sink.log({"global_step": 510, "running_loss": 2.5})

The program's active run gets the records. Else the run is $MLFLOW_RUN_ID, the one with this run's id in its tag, or a
new one. The experiment is the program's (`mlflow.set_experiment`), $MLFLOW_EXPERIMENT_NAME, or lockstep; the server the
program's, $MLFLOW_TRACKING_URI, or a SQLite file in the run's folder.
"""

import logging
import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.config.secrets import mask

__all__ = [
    "MLflow",
]

# Seconds to wait for the server at the end of a run.
_FINISH_TIMEOUT = 120.0
# Tag by which a resumed run finds its MLflow run.
_RUN_TAG = "lockstep.run"
_RUN_VARIABLE = "MLFLOW_RUN_ID"
_EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_ID"
_IDS = (_RUN_VARIABLE, _EXPERIMENT_VARIABLE)
# Parameters in a batch, and characters in a value: limits that every server accepts.
_MOST_PARAMS = 100
_MOST_CHARACTERS = 500


@final
class MLflow:
    """Sink for the program's active run of MLflow, or for one that a resume continues.

    A thread talks to the server, so that a slow one delays nothing. A later `log`, or `close`, raises its errors.
    Records of steps that run again after a resume are logged again, with the same numbers.

    Args:
        folder: the run's.
        experiment: the run's name.
        run_id: see `RunState`; the MLflow run has it as a tag, by which a resume finds it.
    """

    def __init__(self, folder: Path, experiment: str, run_id: str) -> None:
        self._local_uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._experiment = experiment
        self._run_id = run_id
        self._artifacts = (folder / "mlflow").absolute().as_uri()
        # Records, then a status.
        self._queue: queue.SimpleQueue[dict[str, Any] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, info: dict[str, Any]) -> None:
        """Start or resume the run, with `info` as its parameters, from a thread.

        Raises:
            ImportError: the package is missing.
        """
        # Imported here, since loader processes may fork while the thread works. MLflow keeps the active run per thread,
        # so it is read here too.
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # The package's stubs are incomplete.
        api: Any = mlflow
        active = api.active_run()
        # An id belongs to a run or an experiment of MLflow's own store. `mlflow.set_experiment` sets it.
        is_named = active or api.is_tracking_uri_set() or any(map(os.environ.get, _IDS))
        uri = mlflow.get_tracking_uri() if is_named else self._local_uri
        client = mlflow.MlflowClient(tracking_uri=uri)
        tags = {}
        for name, value in resolve_tags({_RUN_TAG: self._run_id}).items():
            tags[name] = mask(value)
        target = _Target(client, active.info.run_id if active else "", tags, is_local=uri == self._local_uri)
        self._thread = threading.Thread(target=self._work, args=(target, info), daemon=True, name="mlflow")
        self._thread.start()

    def log(self, record: dict[str, Any]) -> None:
        """Queue the record's numbers.

        Raises:
            Exception: an earlier error of the server.
        """
        self._queue.put({name: value for name, value in record.items() if not isinstance(value, str | None)})
        self._raise_error()

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run, unless it is the program's. Waits two minutes at most.

        The run counts as failed without a summary, and as killed if steps are left.

        Raises:
            TimeoutError: the server did not take all records in time.
            Exception: an error of the server.
        """
        if self._thread is None:
            return
        ended = "FINISHED" if summary and summary["complete"] else "KILLED"
        self._queue.put("FAILED" if summary is None else ended)
        self._thread.join(_FINISH_TIMEOUT)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not take all records within {_FINISH_TIMEOUT:.0f} s")

    def _raise_error(self) -> None:
        if error := self._error:
            self._error = None
            raise error

    def _work(self, target: "_Target", info: dict[str, Any]) -> None:
        client = target.client
        try:
            run = target.active or self._open(target)
            _log_params(client, run, info)
        except Exception as error:
            # A third party's service may raise anything. `log` or `close` raises it in the main thread.
            self._error = error
            return
        while not isinstance(item := self._queue.get(), str):
            try:
                client.log_batch(run, metrics=_metrics(item))
            except Exception as error:
                # The server may accept the next record, so the thread continues.
                self._error = error
        try:
            if not target.active:
                client.set_terminated(run, status=item)
        except Exception as error:
            self._error = error

    def _open(self, target: "_Target") -> str:
        """Return the id of an own run to log to, which is running."""
        client = target.client
        run = os.environ.get(_RUN_VARIABLE, "")
        if not run:
            experiment = self._find_experiment(target)
            query = f"tags.`{_RUN_TAG}` = '{self._run_id}'"
            runs = client.search_runs([experiment], query, max_results=1)
            if not runs:
                return str(client.create_run(experiment, run_name=self._experiment, tags=target.tags).info.run_id)
            run = str(runs[0].info.run_id)
        client.update_run(run, status="RUNNING")
        return run

    def _find_experiment(self, target: "_Target") -> str:
        """Return the id of the experiment; create it if none has its name."""
        if experiment := os.environ.get(_EXPERIMENT_VARIABLE):
            return experiment
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lockstep"
        if existing := target.client.get_experiment_by_name(name):
            return str(existing.experiment_id)
        # A local store keeps its artifacts in the run's folder too, not in the current one.
        if target.is_local:
            options = {"artifact_location": self._artifacts}
        else:
            options = {}
        return str(target.client.create_experiment(name, **options))


class _Target(NamedTuple):
    """Where records go.

    Attributes:
        client: of the server.
        active: id of the program's own run; "": there is none.
        tags: of a new run.
        is_local: the server is a file in the run's folder.
    """

    client: Any
    active: str
    tags: dict[str, str]
    is_local: bool


def _log_params(client: Any, run: str, info: dict[str, Any]) -> None:
    """Log the parameters that the run lacks: MLflow refuses to change one."""
    data = client.get_run(run).data
    # In the program's own run, plain names may belong to the program's parameters.
    prefix = "" if _RUN_TAG in data.tags else "lockstep."
    params = []
    for param in _params(info, prefix):
        if param.key not in data.params:
            params.append(param)
    for at in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run, params=params[at : at + _MOST_PARAMS])


def _name(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _metrics(record: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    time_ms = time.time_ns() // 1_000_000
    step = int(record["global_step"])
    metrics = []
    for name, value in record.items():
        if name != "global_step":
            metrics.append(Metric(_name(name), float(value), time_ms, step))
    return metrics


def _params(info: dict[str, Any], prefix: str = "") -> list[Any]:
    from mlflow.entities import Param

    params: list[Any] = []
    for name, value in info.items():
        if isinstance(value, dict):
            params += _params(value, prefix if name == "args" else f"{prefix}{name}.")
        else:
            params.append(Param(_name(prefix + name), str(value)[:_MOST_CHARACTERS]))
    return params
