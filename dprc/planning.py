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
        sketch: ``"per_sample"`` or ``"shared"``.
        declared_tokens: Length to choose by, for ``"auto"``; None takes the one asked for.
    """

    def __init__(
        self, capture: Capture, estimator: Estimator, sketch: str, declared_tokens: int | None
    ) -> None:
        self._capture, self._estimator, self._sketch = capture, estimator, sketch
        self._declared_tokens = declared_tokens
        self._chosen = [self._choose(index) for index in range(len(capture.parameters))]

    def law(self) -> ScaleLaw:
        """Return the law of the clipping scale that all parameters together have."""
        exact = estimators.Exact().scale_law()
        return accounting.combine_laws(
            exact if chosen is None else chosen.scale_law() for chosen in self._chosen
        )

    def estimator_of(self, parameter: int) -> Estimator | None:
        """Return a parameter's estimator; None where each sample's gradient is formed.

        A parameter that is used several times gets one that can take several uses.
        """
        chosen = self._chosen[parameter]
        if chosen is None or chosen.linear or not self._capture.has_several_uses(parameter):
            return chosen
        # The sketches of uses add up, which a head's do not; the law of the ratio is the same.
        return estimators.Hutchinson(getattr(chosen, "num_probes", 32), self._sketch)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trained parameter.

        Returns:
            Rows with ``name``, ``shape``, ``captured_as`` (the kinds of modules that use it) and
            ``estimator`` of its norm.
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
                }
            )
        return rows

    def _choose(self, parameter: int) -> Estimator | None:
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
        narrow = min(rows, columns) <= getattr(self._estimator, "num_probes", 0)
        if self._estimator.randomized and (only_ids or narrow):
            # Exact is cheaper here, and an exact share only helps the guarantee.
            return estimators.Exact()
        if self._declared_tokens is None:
            return self._estimator
        candidates = (estimators.Exact(), estimators.Ghost(), self._estimator)
        return min(
            candidates, key=lambda each: each.flops(1, self._declared_tokens or 1, rows, columns)
        )
