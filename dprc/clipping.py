"""From the losses of a micro-batch to the clipped sum of a logical batch's gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from dprc.capture import Capture
from dprc.contributions import Contribution, scale_rows, zero_rows
from dprc.cut import find_cut
from dprc.errors import PrivacyError
from dprc.estimators import Estimator
from dprc.planning import NormPlan
from dprc.precision import model_slack, slack_of, work_dtype
from dprc.processes import OneProcess, Processes
from dprc.schedules import IndependencePass, NormPass, Pass, TotalPass, Totals
from dprc.sketch import SketchSource

# Halving is exact in floating arithmetic, but for the smallest numbers.
HALVED_TOLERANCE = 1e-2


class ClippedSum:
    """The sum of clipped gradients over one logical batch after another, of a captured model.

    Args:
        model: Captured until ``capture.detach()``.
        estimator: Of the norms.
        sketch: ``"per_sample"`` or ``"shared"``.
        schedule: ``"two_pass"`` or ``"book_keeping"``.
        declared_tokens: As for ``NormPlan``.
        max_grad_norm: C, bound on each sample's norm.
        processes: Those that share the samples; None for this one alone.

    Attributes:
        capture: Of the model.
        plan: Which estimator takes the norm of each parameter.
        samples: Samples in the sum of the logical batch under way.
        squared_norms: (B,) of the last micro-batch; None before the first.
        by_parameter: The same for each used parameter, by its index.
        clipped: Samples clipped since construction; of all processes, but of the logical batch
            under way only those of this one.
        excluded: Samples left out since construction, likewise.

    Raises:
        PrivacyError: A parameter or module that cannot be protected.
    """

    def __init__(
        self,
        model: nn.Module,
        estimator: Estimator,
        *,
        sketch: str,
        schedule: str,
        declared_tokens: int | None,
        max_grad_norm: float,
        processes: Processes | None = None,
    ) -> None:
        self._processes: Processes = processes or OneProcess()
        self._model, self._two_pass = model, schedule == "two_pass"
        self._max_grad_norm = max_grad_norm
        self._pass: Pass | None = None
        self._batch = 0
        self._slack = 0.0
        self._totals: Totals | None = None
        self._incomplete = False
        self._ways: dict[tuple[str, ...], bool] = {}  # whether a cut has the samples first
        self.independence_checked = False
        self.cuts_trusted = False  # a simulation has no gradients to follow
        self.samples = 0
        self.squared_norms: torch.Tensor | None = None
        self.by_parameter: dict[int, torch.Tensor] = {}
        self.clipped = self.excluded = 0
        self._counted = (0, 0)  # of both, what all processes know of
        self.capture = Capture(model, self)
        try:
            self.plan = NormPlan(self.capture, estimator, declared_tokens)
            self._processes.attach(self._left)
        except BaseException:
            self.capture.detach()
            raise

    @property
    def totals(self) -> Totals:
        """The sums so far; empty ones where the logical batch has no sample yet."""
        if self._totals is None:
            parameters = [parameter.detach() for parameter in self.capture.parameters]
            self._totals = self._processes.make_totals(parameters)
        return self._totals

    @property
    def under_way(self) -> bool:
        """Whether a logical batch has begun and was not taken."""
        return self._totals is not None

    @property
    def phase(self) -> Pass | None:
        """The backward pass that is running; None between passes."""
        return self._pass

    def take(self) -> Totals:
        """Return the sums of the logical batch, and begin the next."""
        totals = self.totals
        clipped, excluded = self._counted
        new = self._processes.summed((self.clipped - clipped, self.excluded - excluded))
        self.clipped, self.excluded = clipped + int(new[0]), excluded + int(new[1])
        self.forget()
        return totals

    def forget(self) -> None:
        """Drop what was summed of the logical batch under way."""
        self._totals, self.samples, self._incomplete = None, 0, False
        self._counted = (self.clipped, self.excluded)
        self.capture.end_of_batch()

    def detach(self) -> None:
        """Give the model back as it was."""
        self.capture.detach()
        self._processes.detach()

    def refuse_incomplete(self) -> None:
        """Refuse to go on from a sum that holds parts of samples.

        Raises:
            PrivacyError: ``add`` failed on the way.
        """
        if self._incomplete:
            raise PrivacyError(
                "an earlier backward() failed while gradients were being summed (out of memory, "
                "for one), so some samples are partly in the sum. Continue from a saved state "
                "with load_state_dict()."
            )

    def add(self, losses: torch.Tensor, source: SketchSource, *, idle: bool = False) -> None:
        """Clip the gradient of each sample of a micro-batch and add it to the sum.

        Args:
            losses: (B,), B > 0.
            source: Of the sketches of this micro-batch.
            idle: Only go through the model as often as the other processes do: nothing of these
                samples is added or counted.

        Raises:
            PrivacyError: Losses that are not those of the samples at hand, or that depend on other
                samples; a module that mixes samples.
        """
        self._batch = losses.shape[0]
        self._check_batch()
        if not self.independence_checked and self._processes.any_in_step(self._batch > 1):
            self._check_independence(losses)
        self._slack = max(self._slack, slack_of(losses.dtype), model_slack(self._model))
        start: torch.Tensor | GradientEdge = losses
        seeds = torch.ones_like(losses)
        edge = self._cut_edge(losses) if self._two_pass else None
        norms = self._norm_pass(source, keep=not self._two_pass or edge is not None)
        with self._running(norms):
            if edge is not None:
                # What is above the edge is gone through once, and freed.
                start, seeds = edge, torch.autograd.grad(losses, edge, seeds)[0]
                norms.keep = False
            torch.autograd.backward(start, seeds, retain_graph=self._two_pass)
        if idle:
            factors = torch.zeros_like(losses.detach(), dtype=work_dtype(losses.dtype))
            excluded = torch.ones_like(factors, dtype=torch.bool)
        else:
            factors, excluded = self._clip(losses.detach(), norms.per_parameter())
        # From here on the samples are partly in the sum: taking them again would count them twice.
        self._incomplete = True
        weights = factors.to(losses.dtype)
        with self._running(TotalPass(self.totals, excluded)):
            norms.add_totals_(self.totals, factors, excluded)
            for replay in norms.replays:
                replay(weights)
            if self._two_pass:
                by_sample = zero_rows(self.by_sample("model", seeds), excluded)
                weighted = scale_rows(by_sample, factors).to(seeds.dtype)
                torch.autograd.backward(start, weighted.view_as(seeds))
        self.totals.finish_batch()
        if self._processes.in_step:
            self.capture.refuse_gradients()
        self._incomplete = False
        self.samples += 0 if idle else self._batch
        self.capture.end_of_batch()

    # --- called by captured modules ---------------------------------------------------------------

    def by_sample(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a use with the samples on its first axis; see ``Receiver``."""
        if self._pass is None:
            raise PrivacyError(
                f"{path}: backward() was called on a loss directly. Use engine.backward(losses), "
                "or engine.detach() to train without privacy."
            )
        if tensor.shape[0] == self._batch:
            return tensor
        tokens = self.capture.tokens
        if tokens is not None and tensor.shape[0] == self._batch * tokens:
            # Some models merge samples and tokens; the order is checked by _check_independence.
            return tensor.reshape(self._batch, tokens, *tensor.shape[1:])
        raise PrivacyError(
            f"{path}: its output has leading dimension {tensor.shape[0]} where {self._batch} "
            "samples are expected. The module sees samples mixed together; its per-sample gradient "
            "cannot be told apart. Freeze it, or train LoRA adapters elsewhere."
        )

    def observe(self, path: str, grads: torch.Tensor) -> None:
        """See the output gradients of a use; see ``Receiver``."""
        if isinstance(self._pass, IndependencePass):
            self._pass.check(path, grads)

    def receive(self, parameter: int, contribution: Contribution) -> None:
        """Take one use of one parameter from the capture."""
        self._slack = max(self._slack, *map(slack_of, contribution.dtypes))
        if self._pass is not None:
            self._pass.take(parameter, contribution, self.capture.replay)

    # --- internals --------------------------------------------------------------------------------

    def _left(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up over processes the sums of a part of the model that is gone through."""
        if isinstance(self._pass, TotalPass):
            self.totals.reduce(self.capture.indices(parameters))

    def _check_batch(self) -> None:
        self.capture.check_buffers()
        seen = self.capture.batches
        if seen and self._batch not in seen:
            raise PrivacyError(
                f"losses: has {self._batch} entries, but the model was called with "
                f"{' and '.join(map(str, sorted(seen)))} samples. One loss for each sample: take "
                "the mean over its tokens."
            )

    def _check_independence(self, losses: torch.Tensor) -> None:
        """Check once, on the first batch, that a sample's loss reaches no other sample's rows.

        Follows the first and the last sample. Finds layers that mix samples, losses that depend on
        the batch, and models that keep samples on another axis than the first; it cannot see a
        dependence that was cut off from the gradient by detach().
        """
        seen = True
        for sample in (0, self._batch - 1):
            size = self._follow(losses, sample, 1.0)
            seen &= size > 0
            if self._two_pass and not math.isclose(
                4 * self._follow(losses, sample, 0.5), size, rel_tol=HALVED_TOLERANCE
            ):
                raise PrivacyError(
                    "losses: half a sample's loss has not half its gradient, so the second "
                    "backward pass would not give what the first one measured. A backward hook "
                    "that normalises or clamps gradients does that: remove it, or use "
                    'schedule="book_keeping".'
                )
        # A sample without labels shows nothing: check again.
        self.independence_checked = self._processes.any_in_step(seen and self._batch > 1)

    def _follow(self, losses: torch.Tensor, sample: int, weight: float) -> float:
        """Follow a sample's weighted loss alone; return the squared size of its gradients."""
        check = IndependencePass(sample)
        with self._running(check):
            loss = losses[sample]
            torch.autograd.backward(loss, torch.full_like(loss, weight), retain_graph=True)
        return check.size

    def _cut_edge(self, losses: torch.Tensor) -> GradientEdge | None:
        """Find the edge below the head, where the samples can be told apart there."""
        cut = find_cut(losses, self._leading_sizes())
        if cut is None:
            return None
        if self._batch == 1 or self.cuts_trusted:
            return cut.edge
        if cut.way not in self._ways:
            verdict = self._has_samples_first(losses, cut.edge)
            if verdict is None:
                return None
            self._ways[cut.way] = verdict
        return cut.edge if self._ways[cut.way] else None

    def _has_samples_first(self, losses: torch.Tensor, edge: GradientEdge) -> bool | None:
        """Whether the first and the last sample's loss reach their own rows alone at an edge.

        An axis of as many branches as there are samples must not be taken for the samples. None if
        a loss reaches nothing, which shows nothing.
        """
        seen = True
        for sample in (0, self._batch - 1):
            check = IndependencePass(sample)
            with self._running(check):
                (grads,) = torch.autograd.grad(losses[sample], edge, retain_graph=True)
                try:
                    check.check("model", self.by_sample("model", grads))
                except PrivacyError:
                    return False
            seen &= check.size > 0
        return True if seen else None

    def _leading_sizes(self) -> tuple[int, ...]:
        """Return the sizes of a first axis that ``by_sample`` can tell samples apart on."""
        tokens = self.capture.tokens
        return (self._batch,) if tokens is None else (self._batch, self._batch * tokens)

    def _norm_pass(self, source: SketchSource, *, keep: bool) -> NormPass:
        shapes = [parameter.shape for parameter in self.capture.parameters]
        chosen = [self.plan.estimator_of(index) for index in range(len(shapes))]
        return NormPass(shapes, chosen, source, self._batch, uses=self.capture.uses, keep=keep)

    def _clip(
        self, losses: torch.Tensor, norms: dict[int, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # factors (B,), excluded (B,)
        squared = torch.zeros(self._batch, dtype=work_dtype(losses.dtype), device=losses.device)
        for value in norms.values():
            squared = squared + value.to(squared.device)
        self.squared_norms, self.by_parameter = squared, norms
        excluded = ~(squared.isfinite() & losses.isfinite())
        if math.isinf(self._max_grad_norm):
            factors = torch.ones_like(squared)
        else:
            bound = (1 - self._slack) * self._max_grad_norm
            # A zero norm gives infinity, hence 1.
            factors = (bound / squared.sqrt()).clamp(max=1.0)
        factors = factors.masked_fill(excluded, 0.0)
        self.clipped += int(((factors < 1) & ~excluded).sum())
        self.excluded += int(excluded.sum())
        return factors, excluded

    @contextmanager
    def _running(self, current: Pass) -> Iterator[None]:
        self._pass = current
        try:
            with self.capture.recomputing():
                yield
        finally:
            self._pass = None
