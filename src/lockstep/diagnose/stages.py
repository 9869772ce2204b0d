"""The stages of a step, in the order in which two runs are compared: the first that differs is the cause.

Whatever a stage computes from is compared before it, so what is found first did not follow from anything earlier.
"""

__all__ = ["ORDER", "STAGES", "explain"]

# stage -> what a difference there means, given that everything before it is the same
STAGES = {
    "initial weights": "the ranks do not begin with the same weights",
    "weights": "something other than the optimizer changed the weights between two updates",
    "data": "the ranks do not read the samples of this step in the run's order",
    "randomness": "random numbers do not depend on the step and the micro-batch alone",
    "forward": "with the same weights, data and generators the model computes another loss on this rank",
    "normalisation": "the loss is not divided by the items of the whole step",
    "buffers": "the model's buffers depend on which rank computed what",
    "reduction": "gradients are not the sum over all micro-batches of all ranks",
    "clipping": "the gradient is not clipped by the norm of the whole, unscaled gradient",
    "optimizer": "the same gradient leads to another update",
    "schedule": "the learning rate is not the one of this step",
    "evaluation": "the evaluation does not count every sample once",
    "evaluation kernels": "the evaluation has the same items, but its forward is computed by other kernels",
    "optimizer state": "the optimizer's state is not the one of this step",
}

ORDER = tuple(STAGES)


def explain(stage: str) -> str:
    """One sentence: what a first difference in `stage` means. KeyError for a name that is no stage."""
    return STAGES[stage]
