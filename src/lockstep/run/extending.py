"""Training on after the end of the plan, as an explicit act: `--extend-to 2000`, `--extend-to 3epochs`.

    config = extended(config, state)                # before the plan is made
    before = plan_before(state, plan)               # the plan to compare with

The plan becomes longer from where the run stands, and the schedule is that of a run which had so many steps from the
start. `state["extended"]` goes with every later checkpoint, so that a resume needs no flag and agrees.
"""

import dataclasses
from typing import Any

from lockstep.config.config import Config
from lockstep.config.spans import is_span
from lockstep.errors import ConfigError, ResumeError

__all__ = ["check_longer", "described", "extended", "plan_before"]


def extended(config: Config, state: dict[str, Any]) -> Config:
    """The config whose plan is the longer one, where the run was extended or is to be; `state` is told.

    Args:
        state: of the checkpoint to go on from.

    Raises:
        ConfigError: there is no run to go on with.
    """
    known, asked = state.get("extended"), config.extend_to
    if asked and "global_step" not in state:
        raise ConfigError(f"--extend-to {asked} goes on with a run that is there, and there is none: use --max-steps")
    if asked and not (known and known["asked"] == asked):
        known = {"asked": asked, "at": state["global_step"], "from": state["plan"]["steps"], **_length(asked)}
        # The last step may have been short: a new cut begins where it ended.
        state |= {"extended": known, "origin": [state["global_step"], state["position"]]}
    if not known:
        return config
    length = {name: known[name] for name in ("max_steps", "num_epochs") if known[name]}
    optim = config.optim
    if optim.warmup_steps == -1:  # auto: as it was, since those steps are done
        optim = dataclasses.replace(optim, warmup_steps=state["plan"].get("optim.warmup_steps", -1))
    return dataclasses.replace(config, **{"max_steps": 0, **length}, optim=optim)


def _length(asked: int | str) -> dict[str, int]:
    """{"max_steps": steps, or "num_epochs": passes}; the other is 0."""
    epochs = int(str(asked).rstrip(" epochs")) if is_span(asked) else 0
    return {"max_steps": 0 if epochs else int(asked), "num_epochs": epochs}


def plan_before(state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that a resume compares `now` with: the checkpoint's, with the steps that it was extended to."""
    before: dict[str, Any] | None = state.get("plan")
    if before and before["steps"] == state.get("extended", {}).get("from"):
        return before | {name: now[name] for name in ("steps", "optim.period")}  # a period may be a share of the plan
    return before


def check_longer(config: Config, state: dict[str, Any], steps: int) -> None:
    """Raises ResumeError where the plan of `steps` is no longer than what was asked to be extended."""
    known = state.get("extended")
    if known and steps <= known["from"]:
        raise ResumeError(
            f"--extend-to {known['asked']} makes a plan of {steps} steps, and the run's has {known['from']}: give more"
        )


def described(state: dict[str, Any], steps: int, rate: float) -> str:
    """One line on what becomes of the schedule, where the run goes on from the step at which it was extended; else "".

    Args:
        steps: of the longer plan.
        rate: of the coming step.
    """
    known = state.get("extended")
    if not known or known["at"] != state["global_step"]:
        return ""
    return (
        f"extended after step {known['at']} from {known['from']} to {steps} steps: the schedule is stretched, as "
        f"if the plan had been so long from the start, and goes on at a rate of {rate:.3g}"
    )
