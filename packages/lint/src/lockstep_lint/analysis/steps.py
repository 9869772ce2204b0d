"""The calls that make a training step: backward, the optimizer's and the scheduler's step."""

import ast

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.kinds import SCALER, Kinds
from lockstep_lint.analysis.nodes import argument, dotted, last

__all__ = ["Steps"]

# Also that of the optimizer that sets its own rate, as the tutorials of the Transformer have it.
STEPS = ("step", "step_and_update_lr")
HELPERS = (ast.Name, ast.Attribute)


class Steps:
    """Recognises the calls of a training step."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.known: dict[ast.Call, bool] = {}

    def steps_optimizer(self, site: Site) -> bool:
        """Whether a call is `optimizer.step()` or `scaler.step(optimizer)`."""
        found = self.known.get(site.call)
        if found is None:
            found = self.known[site.call] = self._steps_optimizer(site)
        return found

    def _steps_optimizer(self, site: Site) -> bool:
        if self.helps(site):
            return True
        if site.name not in STEPS or site.receiver is None:
            return False
        if self.kinds.is_scaler(site.receiver, site.scope):
            return bool(site.call.args)
        return self.kinds.is_optimizer(site.receiver, site.scope)

    def steps_scheduler(self, site: Site) -> bool:
        """Whether a call is `scheduler.step(...)`."""
        return site.name == "step" and site.receiver is not None and self.kinds.is_scheduler(site.receiver, site.scope)

    def stepped(self, site: Site) -> str:
        """The name of the optimizer that a step is for."""
        if self.helps(site):
            return dotted(argument(site.call, 1, "optimizer")) or ""
        if site.receiver is not None and self.kinds.is_scaler(site.receiver, site.scope) and site.call.args:
            return dotted(site.call.args[0]) or ""
        return dotted(site.receiver) or ""

    def backwards(self, site: Site) -> bool:
        """Whether a call computes gradients (`loss.backward()`, `accelerator.backward(loss)`)."""
        named = site.name in ("backward", "manual_backward") and site.receiver is not None
        return named or self.helps(site) or self.steps_on(site)

    def steps_on(self, site: Site) -> bool:
        """Whether a call hands a loss to an optimizer's step, which computes the gradients itself."""
        loss = site.call.args[0] if site.name == "step" and len(site.call.args) == 1 else None
        if not isinstance(loss, ast.Name) or not loss.id.lower().endswith("loss") or not self.steps_optimizer(site):
            return False
        return self.kinds.names.definition(loss, site.scope) is None  # a closure

    def helps(self, site: Site) -> bool:
        """Whether a call hands loss and optimizer to a scaler's helper, which runs backward and step where that cannot
        be seen (`loss_scaler(loss, optimizer, ...)`, as timm's and MAE's do).
        """
        if not SCALER.search(site.name) or not isinstance(site.call.func, HELPERS):
            return False
        loss, optimizer = argument(site.call, 0, "loss"), argument(site.call, 1, "optimizer")
        if loss is None or optimizer is None or self.kinds.origins.calls.target(site.call, site.scope) is not None:
            return False
        return self.kinds.is_optimizer(optimizer, site.scope)

    def loss_of(self, site: Site) -> ast.expr | None:
        """The loss that a backward call starts from, without a scaler's `scale(...)`."""
        receiver = site.receiver
        if self.helps(site):
            return argument(site.call, 0, "loss")
        if site.name == "step":
            return site.call.args[0]
        if isinstance(receiver, ast.Call) and last(receiver) == "scale" and receiver.args:
            return receiver.args[0]
        if site.call.args and not isinstance(receiver, ast.Call) and "loss" not in last(receiver).lower():
            return site.call.args[0]
        return receiver
