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

    def take(self, tensor):
        storage = local_of(tensor).untyped_storage()
        if storage not in self._known:
            self._known[storage] = None
            self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.take(leaf)
        return found
