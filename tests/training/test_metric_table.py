"""Every class of torchmetrics that needs nothing else: merged it is what one process computes, or it is refused."""

import inspect

import pytest
import torch
import torchmetrics.aggregation
import torchmetrics.classification
import torchmetrics.clustering
import torchmetrics.image
import torchmetrics.nominal
import torchmetrics.regression
import torchmetrics.retrieval
import torchmetrics.segmentation
import torchmetrics.text
from torchmetrics import Metric

from lockstep.errors import ConfigError
from lockstep.training.evaluation import check_mergeable, merge_states, pop_state

_SIZES = (6, 5, 4)  # samples of the batches
_N = sum(_SIZES)


def _random(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _whole(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


def _batches(*columns):
    return list(zip(*(column.split(_SIZES) for column in columns), strict=True))


_TEXTS = [([f"the cat sat on a mat {word}", "one word"], ["a cat sat on the mat b", "two words"]) for word in "abc"]
_ALL = torch.arange(3)  # each batch has every group
_GROUPS = [
    (torch.cat([_ALL, one]), torch.cat([_ALL, two])) for one, two in _batches(_whole(3, _N), _whole(3, 1, _N)[0])
]
_CLUSTERS = _batches(_random(_N, 4), _whole(3, _N))
_INPUTS = {
    "Binary": _batches(_random(_N), _whole(2, _N)),
    "Multiclass": _batches(_random(_N, 3).softmax(1), _whole(3, _N)),
    "Multilabel": _batches(_random(_N, 3), _whole(2, _N, 3)),
    "regression": _batches(_random(_N) + 0.1, _random(_N, 1)[:, 0] + 0.2),
    "image": _batches(_random(_N, 3, 24, 24), (_random(_N, 3, 24, 24) + _random(3, 24, 24)) / 2),
    "clustering": _GROUPS,
    "nominal": _GROUPS,
    "text": _TEXTS,
    "segmentation": _batches(_whole(2, _N, 3, 8, 8), _whole(2, 3, _N, 8, 8).transpose(0, 1)),
    "retrieval": _batches(_random(_N), _whole(2, _N), torch.arange(_N) // 4),
    "aggregation": _batches(_random(_N)),
}
_ROWS = _batches(_random(_N, 4).softmax(1), _random(4, _N).T.softmax(1))
_OTHERS = {
    **dict.fromkeys(("CosineSimilarity", "JensenShannonDivergence", "KLDivergence"), _ROWS),
    "ContinuousRankedProbabilityScore": _batches(_random(_N, 4), _random(_N)),
    "TotalVariation": [(images,) for images, _ in _INPUTS["image"]],
    "PeakSignalNoiseRatioWithBlockedEffect": [(one[:, :1], two[:, :1]) for one, two in _INPUTS["image"]],
    "Perplexity": _batches(_random(_N, 5, 3), _whole(3, _N, 5)),
    **dict.fromkeys(("CalinskiHarabaszScore", "DaviesBouldinScore", "DunnIndex"), _CLUSTERS),
}  # fmt: skip
_WANTED = {
    "num_classes": 3, "num_labels": 3, "beta": 0.5, "min_recall": 0.5, "min_precision": 0.5, "min_specificity": 0.5,
    "min_sensitivity": 0.5, "threshold": 0.5, "p": 3, "data_range": 1.0, "num_outputs": 1,
}  # fmt: skip
_ELSEWHERE = {
    # another package, or weights that are loaded
    *("DeepImageStructureAndTextureSimilarity", "MemorizationInformedFrechetInceptionDistance", "ClusterAccuracy"),
    *("ROUGEScore", "BERTScore", "InfoLM"),
    *("LearnedPerceptualImagePatchSimilarity", "PerceptualPathLength", "FrechetInceptionDistance"),
    *("KernelInceptionDistance", "InceptionScore", "ARNIQA"),
    # larger images, or inputs of a form of their own
    *("MultiScaleStructuralSimilarityIndexMeasure", "VisualInformationFidelity", "SpatialDistortionIndex"),
    *("QualityWithNoReference", "BinaryFairness", "BinaryGroupStatRates", "FleissKappa", "SQuAD"),
}
_MORE = {
    "aggregation": ("CatMetric", "MaxMetric", "MeanMetric", "MinMetric", "RunningMean", "RunningSum", "SumMetric"),
}


def _names():
    for part in ("classification", *_INPUTS):
        module = getattr(torchmetrics, part, None)
        for name in _MORE.get(part) or getattr(module, "__all__", ()):
            by_task = part == "classification" and not name.startswith(("Binary", "Multiclass", "Multilabel"))
            if name not in _ELSEWHERE and not by_task:
                yield part, name


def _made(part, name):
    """A metric, and the batches that it is updated with."""
    kind = getattr(getattr(torchmetrics, part), name)
    asked = inspect.signature(kind.__init__).parameters
    own = {key: value for key, value in _WANTED.items() if key in asked}
    if name in ("CramersV", "PearsonsContingencyCoefficient", "TheilsU", "TschuprowsT"):
        own = {"num_classes": 3}
    elif name.startswith("Binary"):
        own.pop("num_classes", None)
    first = next((prefix for prefix in ("Binary", "Multiclass", "Multilabel") if name.startswith(prefix)), part)
    found = _OTHERS.get(name) or _INPUTS[first]
    if part == "retrieval":
        found = [(scores, labels.clone(), place) for scores, labels, place in found]
    return kind(**own), found


def _update(metric, batch):
    if len(batch) == 3:
        metric.update(*batch[:2], indexes=batch[2])
    else:
        metric.update(*batch)


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


_REFUSED = ("NormalizedRootMeanSquaredError", "RunningMean", "RunningSum")  # though one number each


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("part", "name"), list(_names()))
def test_metric_merged_over_batches_is_one_processs_or_refused(part, name):
    metric, batches = _made(part, name)
    refused = None
    for count in (1, 2, 3):
        whole = metric.clone()
        for batch in batches[:count]:
            _update(whole, batch)
        expected, states = _number(whole.compute()), []
        for batch in batches[:count]:
            _update(metric, batch)
            states.append(pop_state(metric))
        try:
            check_mergeable("it", metric, states[0])
        except ConfigError as error:
            refused = str(error)
            assert name in refused
            continue
        assert merge_states("it", metric, states) == {"it": pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)}
    assert (refused is not None) == (expected is None or name in _REFUSED)


class Own(Metric):
    """One state of one number, added to with each batch."""

    full_state_update: bool | None = False

    def __init__(self, reduction):
        super().__init__()
        self.add_state("held", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, value):
        self.held = self.held + value

    def compute(self):
        return self.held.sum()


class Undeclared(Own):
    full_state_update = None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (Own("mean"), "held"),
        (Own(lambda states: states.prod(0)), "held"),
        (Own(None), "held"),
        (Undeclared("sum"), "full_state_update"),
        (Own("sum") + 1.0, "other metrics"),
    ],
)
def test_custom_metric_without_a_merge_rule_is_refused_by_name(metric, why):
    metric.update(torch.tensor(2.0))
    with pytest.raises(ConfigError, match=rf"'mine' \({type(metric).__name__}\).*{why}"):
        check_mergeable("mine", metric, pop_state(metric))
