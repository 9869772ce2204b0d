"""A check within its time: what does not end becomes a finding, and the rest goes on.

found, hung = within(check, place, 5.0)
"""

import sys
import threading
import time
from pathlib import Path
from types import FrameType

from lockstep.diagnose.doctor.finding import Check, Finding, Found, Place, fail
from lockstep.errors import LockstepError

__all__ = ["within"]

_PACKAGE = str(Path(__file__).parents[2])


def within(check: Check, place: Place, seconds: float) -> tuple[Found, bool]:
    """What `check` finds here, and whether it hung: then its thread is left behind, and the finding says where.

    An error inside a check is its finding too: a doctor who falls ill helps nobody.
    """
    box: list[Found] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            box.append(check.run(place))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"lockstep-doctor-{check.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        stands = _place(sys._current_frames().get(thread.ident or 0))
        text = f"did not end within {time.monotonic() - began:.0f} s" + (f", and stands in {stands}" if stands else "")
        return Found([fail(check.name, text, check.stuck)]), True
    if errors:
        return Found([_fallen(check, errors[0])]), False
    return box[0], False


def _fallen(check: Check, error: BaseException) -> Finding:
    told = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, LockstepError):
        text, _, mend = told.partition("; ")
        return fail(check.name, text, mend or "see the text")
    return fail(check.name, f"could not be made: {type(error).__name__}: {told}", "mend that first, then ask again")


def _place(frame: FrameType | None) -> str:
    """The innermost line of lockstep in which a thread stands: `network.py:81 (_connected)`."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""
