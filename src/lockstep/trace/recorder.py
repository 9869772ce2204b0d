"""The recording of one process, which hooks.py fills: its journal, and what each stage puts there.

recorder = Recorder(Options.read())
recorder.passes.loaded(...); recorder.updates.before(optimizer); recorder.updates.after(optimizer); recorder.close()
"""

from lockstep.trace.journal import Journal, Options, quiet
from lockstep.trace.names import Names
from lockstep.trace.passes import Passes
from lockstep.trace.updates import Updates

__all__ = ["Recorder"]


class Recorder:
    """A journal; `passes`: what happens between two updates; `updates`."""

    def __init__(self, options: Options) -> None:
        names = Names()
        self.journal = Journal(options)
        self.passes = Passes(self.journal, names)
        self.updates = Updates(self.journal, names, self.passes)

    @quiet
    def close(self) -> None:
        """The process ends."""
        self.journal.close()
