"""Whether anything is trained at all: two runs that both do nothing have the same bits."""

from dataclasses import dataclass

from lockstep.trace.pairing import Spot

__all__ = ["Trained"]


@dataclass
class Trained:
    """What the steps of a run have done so far.

    Attributes:
        got: a gradient was there; counts: one was not 0; moved: a weight changed its bits.
        rate: the largest learning rate.
    """

    got: bool = False
    counts: bool = False
    moved: bool = False
    rate: float = 0.0

    def look(self, spot: Spot) -> None:
        """Takes in a step."""
        gradients = spot.tensors("grad").values()
        record = next(iter(spot.part.records(spot.at).values()))
        hidden = record["kind"] == "DeepSpeedEngine"  # which says the norm alone
        self.got |= hidden or bool(gradients)
        self.counts |= (hidden and record.get("norm") != 0) or any(whole.square for whole in gradients)
        old = spot.before()
        self.moved |= any(
            name not in old or old[name].digest != whole.digest for name, whole in spot.tensors("weights").items()
        )
        rates = (group.get("lr", 0.0) for group in record["groups"])
        self.rate = max(self.rate, *(float(rate[0] if isinstance(rate, list) else rate) for rate in rates), 0.0)

    def note(self, steps: int) -> list[str]:
        """What to say after `steps` steps: nothing where a gradient was not 0 and a weight moved."""
        if not steps or (self.counts and self.moved):
            return []
        if not self.got:
            return [f"no tensor of the optimizer has a gradient in any of the {steps} steps: nothing is trained"]
        if not self.counts:
            moves = "; weight decay alone moves the weights" if self.moved else ""
            return [f"every gradient is 0 in all {steps} steps: nothing is trained{moves}"]
        return [f"the weights never change in {steps} steps: nothing is trained (largest learning rate: {self.rate:g})"]
