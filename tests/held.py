"""Bytes that are held: counted over all storages, on a CPU, while operations run."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.tensors import local_of


class Held(TorchDispatchMode):
    """Bytes of the storages that operations within made and that are still there; `peak` is the most of them."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    @property
    def now(self):
        return sum(storage.nbytes() for storage in self._known)  # FSDP2 empties storages that it keeps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        fresh = False
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = local_of(leaf).untyped_storage()
                fresh = fresh or storage not in self._known
                self._known[storage] = None
        if fresh:  # once for all results of an operation: the sum takes a sixth of a run
            self.peak = max(self.peak, self.now)
        return found
