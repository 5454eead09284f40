"""Which estimator takes the norm of each parameter: chosen once, never from the data."""

from typing import Any

from dprc import accounting, estimators
from dprc.accounting import ScaleLaw
from dprc.capture import Capture
from dprc.contributions import matrix_shape
from dprc.estimators import Estimator
from dprc.sites import EmbeddingSite, FactorSite


class NormPlan:
    """The estimators of a captured model's parameters.

    Args:
        capture: The captured model.
        estimator: The one asked for.
        declared_tokens: Length to choose by, for ``"auto"``; None takes the one asked for.
    """

    def __init__(self, capture: Capture, estimator: Estimator, declared_tokens: int | None) -> None:
        self._capture, self._declared_tokens = capture, declared_tokens
        indices, several = range(len(capture.parameters)), estimator.of_several_uses()
        self._chosen = [self._choose(index, estimator) for index in indices]
        self._of_several = [self._choose(index, several) for index in indices]

    def law(self) -> ScaleLaw:
        """Return the law of the clipping scale that all parameters together have.

        Any parameter may turn out to have several uses.
        """
        exact = estimators.Exact()
        used = dict.fromkeys(each or exact for each in (*self._chosen, *self._of_several))
        return accounting.combine_laws(each.scale_law() for each in used)

    def estimator_of(self, parameter: int) -> Estimator | None:
        """Return a parameter's estimator; None where each sample's gradient is formed.

        A parameter that is used several times gets one that can take several uses.
        """
        several = self._capture.has_several_uses(parameter)
        return (self._of_several if several else self._chosen)[parameter]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trained parameter.

        Returns:
            Rows with ``name``, ``shape``, ``captured_as`` (the kinds of modules that use it),
            ``estimator`` of its norm, its ``num_probes`` (None if it is exact) and ``head_rank``
            (None without a head of its own rank).
        """
        rows = []
        for index, name in enumerate(self._capture.names):
            kinds = {
                type(site).__name__.removesuffix("Site").lower()
                for site in self._capture.sites
                if index in site.parameters
            }
            estimator = self.estimator_of(index)
            rows.append(
                {
                    "name": name,
                    "shape": list(self._capture.parameters[index].shape),
                    "captured_as": "+".join(sorted(kinds)),
                    "estimator": "exact" if estimator is None else estimator.name,
                    "num_probes": getattr(estimator, "num_probes", None),
                    "head_rank": getattr(estimator, "head_rank", None),
                }
            )
        return rows

    def _choose(self, parameter: int, wanted: Estimator) -> Estimator | None:
        shape = self._capture.parameters[parameter].shape
        sites = [
            site
            for site in self._capture.sites
            if isinstance(site, FactorSite) and site.weight == parameter
        ]
        if not sites or len(shape) < 2:
            return None  # a vector, or looped over
        rows, columns = matrix_shape(shape)
        only_ids = all(isinstance(site, EmbeddingSite) for site in sites)
        narrow = min(rows, columns) <= getattr(wanted, "num_probes", 0)
        if wanted.randomized and (only_ids or narrow):
            # Exact is cheaper here, and an exact share only helps the guarantee.
            return estimators.Exact()
        if self._declared_tokens is None:
            return wanted
        candidates = (estimators.Exact(), estimators.Ghost(), wanted)
        return min(
            candidates, key=lambda each: each.flops(1, self._declared_tokens or 1, rows, columns)
        )
