"""DeepSpeed's engine: the calls of it that wait for all ranks."""

import ast

from lockstep.lint.analysis.context import guards
from lockstep.lint.analysis.index import Site
from lockstep.lint.analysis.nodes import dotted, idents, is_true, last, walk
from lockstep.lint.analysis.view import View

__all__ = ["asks_for_deepspeed", "saves_on_all"]

# With ZeRO each rank writes its own part, or hands it to the others; the engine waits for all of them in any case.
SAVES = {"save_checkpoint", "save_16bit_model", "save_fp16_model"}
# They save by themselves, in their own way.
OTHERS = {"lightning", "pytorch_lightning", "lockstep", "composer", "accelerate"}


def saves_on_all(view: View, site: Site) -> bool:
    """Whether a call has DeepSpeed's engine save, by what made its object, what that is called, or the test around."""
    if site.name not in SAVES or site.receiver is None or OTHERS & view.frameworks:
        return False
    if view.calls.target(site.call, site.scope) is not None or kept_out(view, site):
        return False
    if "deepspeed" in view.frameworks and ("engine" in last(site.receiver) or by_deepspeed(view, site)):
        return True
    return any(guard.when and asks_for_deepspeed(guard.test) for guard in guards(site.stmt, site.module))


def kept_out(view: View, site: Site) -> bool:
    """Whether the flag of the main rank around a call is True wherever another flag is off (`main = True` under `if not
    ddp`), as it may be where DeepSpeed runs the processes.
    """
    keys = {key for guard in guards(site.stmt, site.module) for node in walk(guard.test) if (key := dotted(node))}
    binds = [bind for key in keys for bind, _ in view.ranks.tests.numbers.bound(key, site.scope)]
    return any(is_true(bind.value) for bind in binds)


def by_deepspeed(view: View, site: Site) -> bool:
    """Whether the object of a call is what DeepSpeed made of a model, whatever it is called."""
    binds = view.origins.binds(dotted(site.receiver) or "", site.scope, site.line)
    made = ((bind.value, home) for bind, home in binds if isinstance(bind.value, ast.Call))
    return any(view.names.qualify(call.func, home) == "deepspeed.initialize" for call, home in made)


def asks_for_deepspeed(test: ast.expr) -> bool:
    """Whether a test asks whether DeepSpeed is used."""
    return any("deepspeed" in name.lower() for name in idents(test))
