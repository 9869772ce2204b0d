"""Python's collections of garbage, kept from what stays for the whole run.

    with Frozen() as frozen:
        frozen.begin()          # once engine, compiler and loaders are made: later collections leave them out

A full collection visits every object of torch, the compiler and the run, and holds the loop for some tenths of a
second, on one rank at a time, while the others wait.
"""

import gc
from typing import Self

__all__ = ["Frozen"]

_ENOUGH = 50_000  # objects, which a collection visits in some hundredths of a second


class Frozen:
    """Objects of the first step, exempt from garbage collection until the loop ends.

    Nothing is changed where the caller has turned collections off, or where there is little to visit, as after a
    `gc.freeze()` of the caller's own. At the end all of it goes back: engine and hooks make cycles of a model and what
    is around it, which a collection alone can free, and another run may follow in this process. Python cannot give back
    a part of what is frozen, so what the caller had frozen before is visited again too.
    """

    def __init__(self) -> None:
        self._frozen = False

    def begin(self) -> None:
        """Collect once, and leave what survives out of the collections to come."""
        if not gc.isenabled():
            return
        gc.collect()
        if len(gc.get_objects(generation=2)) > _ENOUGH:
            gc.freeze()
            self._frozen = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._frozen:
            gc.unfreeze()
