"""The privacy engine: per-sample clipping by estimated norms, noise, and accounting of a model."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from dprc import accounting, arguments
from dprc.accounting import validate
from dprc.clipping import ClippedSum
from dprc.errors import PrivacyError
from dprc.estimators import Estimator
from dprc.noise import RandomStreams, add_gaussian_noise_
from dprc.processes import Processes, joined, refuse_unknown
from dprc.sampling import MapDataset, PoissonLoader, Share, draw_share, refuse_out_of_step
from dprc.sketch import SketchSource

SCHEDULES = ("two_pass", "book_keeping")


class PrivacyEngine:
    """Trains a model with DP-SGD and randomized clipping.

    The engine captures the model's trained parameters, so that ``backward`` sees each sample's
    gradient, and owns the only way to change them: ``step``.

    Args:
        model: Its trained parameters (``requires_grad``) must be in ``optimizer``, and no others.
        optimizer: Any ``torch.optim.Optimizer``; it is not wrapped, so schedulers act on it.
        max_grad_norm: C > 0, bound on each sample's gradient norm over the whole model.
        noise_multiplier: σ ≥ 0; the noise on the sum of gradients has deviation σC.
        sample_rate: q in (0, 1], with which Poisson sampling includes each sample.
        expected_batch_size: What the noised sum is divided by: a public number, q times a public
            dataset size. Never the size of the batch at hand.
        estimator: A name of ``dprc.estimators.names()``, ``"auto"``, or an ``Estimator`` (then
            ``num_probes``, ``sketch`` and ``head_rank`` stay at their defaults). A randomized one
            is used where the parameter is a matrix wider than its probes; the rest is exact.
            ``"auto"`` takes, for each parameter, the cheapest of exact, ghost and hutchinson, or
            hutchpp if ``head_rank`` is given. None is ``"hutchpp"`` with 26 probes and a head of
            rank 2; but ``"hutchinson"`` if ``num_probes`` or the paper's analysis is asked for.
        num_probes: Probes k of a randomized estimator; of the tail of ``"hutchpp"``. None: 32.
        sketch: ``"per_sample"``, or ``"shared"`` as in the paper.
        head_rank: Rank of the head of ``"hutchpp"``; with 2, and 26 probes, clipping costs the
            work of 32 probes and hardly more noise than exact norms. A parameter that is used
            several times takes so many more probes instead that the same law holds. None with
            ``"hutchpp"`` by name: as many as probes, as in the paper.
        schedule: ``"two_pass"``, or ``"book_keeping"``, which keeps activations and gradients of
            all layers and saves the second backward pass.
        analysis: ``"tight"``, or ``"envelope"`` as in the paper (``shared`` only).
        max_tokens: Declared largest number of tokens of a sample; only ``"auto"`` needs it. The
            choice is made once from it: made from the batch at hand, one long sample would change
            the clipping of all others.
        privacy_seed: None takes randomness from the operating system. An int repeats a run, warns,
            and makes ``releasable`` False.
        processes: Of ``dprc.distributed.replicate`` or ``shard``, where several processes train
            one model: each takes a share of every logical batch, and all numbers here are those
            of the whole job. None where this is the only one.

    Raises:
        PrivacyError: A parameter or module that cannot be protected; an optimizer with other
            parameters than the trained ones; infinite max_grad_norm with noise; several processes
            that do not know of each other, or that were given different arguments.
        ValueError: A number out of range or an unknown name.
        TypeError: A value of the wrong type.

    Guarantee: with samples drawn by ``poisson_loader`` (add/remove adjacency, one item one
        privacy unit), all parameters after any number of steps are (ε, δ)-private with ε =
        ``epsilon(δ)``, assuming exact Gaussian noise. ``squared_norms``, ``clipped_samples``,
        losses, and whatever is chosen by looking at them are not covered.

    Source: Algorithm 1 of Ullah et al. (arXiv 2605.24879). Deviations: per-sample sketches and
        the analysis for them (docs/theory.md), and norms over all parameters at once.

    Example:
        >>> import warnings; warnings.simplefilter("ignore")
        >>> model = nn.Linear(64, 2)
        >>> engine = PrivacyEngine(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
        ...     noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=8, privacy_seed=0)
        >>> x, y = torch.randn(8, 64), torch.randint(2, (8,))
        >>> engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        >>> engine.step()
        >>> 0 < engine.epsilon(1e-5) < 10
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        sample_rate: float,
        expected_batch_size: float,
        estimator: str | Estimator | None = None,
        num_probes: int | None = None,
        sketch: str = "per_sample",
        head_rank: int | None = None,
        schedule: str = "two_pass",
        analysis: str = "tight",
        max_tokens: int | None = None,
        privacy_seed: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._processes = joined(processes, model, arguments=locals())
        self.noise_multiplier = validate.noise_multiplier(noise_multiplier, allow_zero=True)
        self.sample_rate = validate.sample_rate(sample_rate)
        self._max_grad_norm = arguments.clipping_bound(max_grad_norm, self.noise_multiplier)
        self.expected_batch_size = arguments.batch_size(expected_batch_size)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.schedule, self.analysis = schedule, analysis
        declared = arguments.declared_tokens(estimator, max_tokens)
        name, probes, head = arguments.with_defaults(estimator, num_probes, head_rank, analysis)
        self.estimator = arguments.chosen_estimator(name, probes, sketch, head)
        self.sketch: str = getattr(self.estimator, "sketch", sketch)

        self.model, self.optimizer = model, optimizer
        arguments.check_optimizer(model, optimizer)
        self._sum = ClippedSum(
            model,
            self.estimator,
            sketch=self.sketch,
            schedule=schedule,
            declared_tokens=declared,
            max_grad_norm=self.max_grad_norm,
            processes=self._processes,
        )
        self._capture, self._plan = self._sum.capture, self._sum.plan
        try:
            self.law = self._plan.law()
            validate.sketch_and_analysis(self.sketch, analysis, self.law)
            if self.noise_multiplier > 0:
                self.law.require_private()
            keys = RandomStreams.from_seed(privacy_seed).state_dict()
            self._streams = RandomStreams.from_state_dict(self._processes.from_first(keys))
        except BaseException:
            self._sum.detach()
            raise
        self.accountant = accounting.Accountant()
        self._max_steps: int | None = None
        self._step_index = 0  # keys noise, sketches and samples: never repeats
        self._share: Share | None = None  # of the loader's logical batch under way
        self._has_loader = False
        self._sampled_by_loader = True
        self._stepping = False
        self._optimizer_guard = optimizer.register_step_pre_hook(self._refuse_foreign_step)

    @classmethod
    def with_epsilon(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        sample_rate: float,
        estimator: str | None = None,
        num_probes: int | None = None,
        sketch: str = "per_sample",
        head_rank: int | None = None,
        analysis: str = "tight",
        **others: Any,
    ) -> Self:
        """Make an engine whose noise keeps ``steps`` steps within (epsilon, delta).

        Args:
            model: As for the class.
            optimizer: As for the class.
            epsilon: Target, above 0.
            delta: Target, in (0, 1).
            steps: Optimizer steps; one more raises PrivacyError.
            sample_rate: As for the class, as are all that follow.
            estimator: A name, or None, as for the class.
            num_probes: Probes k.
            sketch: ``"per_sample"`` or ``"shared"``.
            head_rank: Rank of the head of ``"hutchpp"``.
            analysis: ``"tight"`` or ``"envelope"``.
            **others: Passed on to the class, which refuses what it does not know.

        Raises:
            ValueError: A target out of range, or ``noise_multiplier`` given as well.
        """
        if "noise_multiplier" in others:
            raise ValueError("noise_multiplier: is computed from epsilon here; leave it out")
        name, probes, head = arguments.with_defaults(estimator, num_probes, head_rank, analysis)
        clipping: dict[str, Any] = {
            "estimator": name,
            "num_probes": probes,
            "sketch": sketch,
            "head_rank": head,
            "analysis": analysis,
        }
        # What "auto" may choose has no worse law than the randomized estimator among it.
        charged = clipping | {"estimator": arguments.randomized_name(name, head)}
        target: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "sample_rate": sample_rate,
            "steps": steps,
        }
        sigma = accounting.noise_multiplier(**target, **charged)
        engine = cls(
            model,
            optimizer,
            noise_multiplier=sigma,
            sample_rate=sample_rate,
            **clipping,
            **others,
        )
        if engine.law.is_exact and engine.estimator.randomized:
            # Every norm is exact here (LoRA, for one), which needs less noise.
            engine.noise_multiplier = accounting.noise_multiplier(**target, estimator="exact")
        engine._max_steps = steps
        return engine

    # --- one step ---------------------------------------------------------------------------------

    def backward(self, losses: torch.Tensor) -> None:
        """Clip each sample's gradient and add the sum to the engine's buffers.

        Args:
            losses: (B,), one loss for each sample, each a function of that sample alone. Call once
                for each micro-batch. A sample whose loss or norm is not finite contributes zero.

        Raises:
            PrivacyError: A scalar or (B, T) loss; a module that saw another number of samples.
            TypeError: Not a tensor.
            ValueError: A loss that depends on no parameter.
        """
        self._sum.refuse_incomplete()
        arguments.check_losses(losses)
        if losses.shape[0] == 0:
            self._capture.end_of_batch()
            return
        refuse_unknown(self._processes.world_size)
        if self._processes.in_step:
            refuse_out_of_step(self._share)
        else:  # a sharded model is gathered now; step() looks at it
            arguments.check_unchanged(self.model, self.optimizer, self._capture.parameters)
        samples, ranks = self._sum.samples, self._processes.world_size
        idle = self._share is not None and self._share.is_over(samples, losses.shape[0])
        source = SketchSource(
            self._streams.sketch,
            self.sketch,
            step=self._step_index,
            first_sample=samples * ranks + self._processes.rank,
            stride=ranks,
        )
        self._sum.add(losses, source, idle=idle)
        if self._share is not None and idle:
            self._share = self._share._replace(idle=self._share.idle - 1)

    def step(self) -> None:
        """Add noise once, divide by the expected batch size, step the optimizer, account.

        To be called once for each logical batch, also for an empty one.

        Raises:
            PrivacyError: More steps than ``with_epsilon`` calibrated for; replicas whose parameters
                differ.
        """
        self._sum.refuse_incomplete()
        if self._max_steps is not None and self.accountant.steps >= self._max_steps:
            raise PrivacyError(
                f"step: noise was calibrated for {self._max_steps} steps, and all are taken. "
                "Calibrate for more, or stop here."
            )
        if self._has_loader and self._share is None:
            raise PrivacyError(
                "step: there is no new logical batch. Take exactly one step for each logical batch "
                "of poisson_loader."
            )
        refuse_unknown(self._processes.world_size)
        if self._processes.in_step:
            refuse_out_of_step(self._share, taken=self._sum.samples)
        self._processes.rest()
        arguments.check_unchanged(self.model, self.optimizer, self._capture.parameters)
        named = zip(self._capture.names, self._capture.parameters, strict=True)
        self._processes.refuse_unequal(dict(named))
        self._sampled_by_loader &= self._share is not None
        totals, index = self._sum.take(), self._step_index
        self._step_index, self._share = index + 1, None
        self.optimizer.zero_grad(set_to_none=True)
        # Accounted before anything leaves the engine: a failing optimizer has seen the gradient.
        self.accountant.step(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            law=self.law,
            sketch=self.sketch,
            analysis=self.analysis,
        )
        with torch.no_grad():
            for number, parameter in enumerate(self._capture.parameters):
                total = totals.pop(number)
                if self.noise_multiplier > 0:
                    add_gaussian_noise_(
                        total,
                        standard_deviation=self.noise_multiplier * self.max_grad_norm,
                        stream=self._streams.noise,
                        step=index,
                        parameter=number,
                        part=totals.part(number),
                    )
                mean = total.div_(self.expected_batch_size).to(parameter.dtype)
                parameter.grad = totals.as_gradient(number, mean)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            self.optimizer.zero_grad(set_to_none=True)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on ε at ``delta`` for the steps taken so far.

        Warns if samples came from elsewhere than ``poisson_loader``: it is a bound only if they
        were drawn as Poisson sampling draws them.
        """
        arguments.warn_of_other_sampling(self.accountant.steps, self._sampled_by_loader)
        return self.accountant.epsilon(delta)

    def poisson_loader(
        self,
        dataset: MapDataset,
        *,
        steps: int,
        max_physical_batch: int,
        collate_fn: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
    ) -> PoissonLoader:
        """Return logical batches sampled as the accounting assumes.

        Args:
            dataset: With ``__len__`` and ``__getitem__``; one item is one privacy unit.
            steps: Number of optimizer steps.
            max_physical_batch: Most samples that go through the model at once.
            collate_fn: Makes a batch of a list of items; it must treat each item alone.

        Returns:
            An iterable of logical batches, each an iterable of physical ones::

                for logical_batch in engine.poisson_loader(dataset, ...):
                    for batch in logical_batch:  # none at all if the logical batch is empty
                        engine.backward(loss_fn(model, batch))
                    engine.step()

        Raises:
            TypeError: The dataset cannot be indexed.
            ValueError: A count below 1.
        """
        loader = PoissonLoader(
            dataset,
            self,
            steps=steps,
            max_physical_batch=max_physical_batch,
            collate_fn=collate_fn,
        )
        facts = {"steps": steps, "max_physical_batch": max_physical_batch}
        self._processes.check_dataset(dataset, facts)
        return loader

    def begin_logical_batch(self, dataset: MapDataset, max_physical_batch: int) -> Share:
        """Draw the samples of the next step; called by the loader, once for each step.

        Raises:
            PrivacyError: The logical batch before had no ``step()``.
        """
        if self._share is not None or self._sum.samples > 0:
            raise PrivacyError(
                "poisson_loader: the logical batch before was not finished. Call engine.step() "
                "once after each logical batch, also after an empty one."
            )
        self._share = draw_share(
            self._streams.sampling,
            self._processes,
            size=len(dataset),
            sample_rate=self.sample_rate,
            step=self._step_index,
            max_physical_batch=max_physical_batch,
        )
        self._has_loader = True
        return self._share

    # --- diagnostics: none of them is private -----------------------------------------------------

    @property
    def squared_norms(self) -> torch.Tensor:
        """Estimated squared norms (B,) of the last ``backward``. Not private."""
        if self._sum.squared_norms is None:
            raise ValueError("squared_norms: no backward() yet")
        return self._sum.squared_norms

    @property
    def squared_norms_by_parameter(self) -> dict[str, torch.Tensor]:
        """Estimated squared norms (B,) of each parameter that was used. Not private."""
        norms = self._sum.by_parameter
        return {self._capture.names[index]: value for index, value in norms.items()}

    @property
    def clipped_samples(self) -> int:
        """Number of samples clipped since construction. Not private."""
        return self._sum.clipped

    @property
    def excluded_samples(self) -> int:
        """Number of samples left out since construction for a non-finite gradient. Not private."""
        return self._sum.excluded

    @property
    def max_grad_norm(self) -> float:
        """C. Fixed: noise and clip factors must agree on it, whatever a step has seen already."""
        return self._max_grad_norm

    @property
    def sampled_by_loader(self) -> bool:
        """Whether every step took its samples from ``poisson_loader``.

        Otherwise whoever sampled vouches for Poisson sampling at ``sample_rate``.
        """
        return self._sampled_by_loader

    @property
    def releasable(self) -> bool:
        """Whether the randomness was secret: False with a fixed ``privacy_seed``."""
        return self._streams.releasable

    def plan(self) -> list[dict[str, Any]]:
        """Return how each trained parameter is treated: see ``NormPlan.rows``."""
        return self._plan.rows()

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps. It holds the keys: as sensitive as the data.

        Continue it once, with the same data. Two continuations repeat the same noise, so with
        different data the difference of what they release has none.

        Raises:
            PrivacyError: A logical batch is under way.
        """
        self._sum.refuse_incomplete()
        if self._sum.under_way or self._share is not None:
            raise PrivacyError("state_dict: a logical batch is under way; call step() first")
        return {
            "accountant": self.accountant.state_dict(),
            "streams": self._streams.state_dict(),
            "settings": self._settings(),
            "step_index": self._step_index,
            "has_loader": self._has_loader,
            "sampled_by_loader": self._sampled_by_loader,
            "clipped_samples": self._sum.clipped,
            "excluded_samples": self._sum.excluded,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: same noise, sketches and samples to come.

        Raises:
            PrivacyError: Another mechanism or other parameters, or steps were taken already.
        """
        self._processes.agree({"state": state})
        arguments.check_state(state["settings"], self._settings())
        if self._step_index not in (0, state["step_index"]):
            raise PrivacyError(
                f"load_state_dict: this engine has taken {self._step_index} steps, whose noise "
                "would be drawn again. Load into a new engine."
            )
        self._step_index = state["step_index"]
        self._has_loader = state["has_loader"]
        self._sampled_by_loader, self._share = state["sampled_by_loader"], None
        self.accountant.load_state_dict(state["accountant"])
        self._streams = RandomStreams.from_state_dict(state["streams"])
        self._sum.clipped = state["clipped_samples"]
        self._sum.excluded = state["excluded_samples"]
        self._sum.forget()

    def _settings(self) -> dict[str, Any]:
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "sample_rate": self.sample_rate,
            "expected_batch_size": self.expected_batch_size,
            "estimator": repr(self.estimator),
            "sketch": self.sketch,
            "analysis": self.analysis,
            "max_steps": self._max_steps,
            "parameters": [(row["name"], row["shape"]) for row in self.plan()],
        }

    def detach(self) -> None:
        """Give model and optimizer back as they were."""
        self._sum.detach()
        self._optimizer_guard.remove()

    # --- internals --------------------------------------------------------------------------------

    def _refuse_foreign_step(self, *_: Any) -> None:
        if not self._stepping:
            raise PrivacyError(
                "optimizer.step() was called directly, which would apply a gradient without "
                "noise or accounting. Call engine.step()."
            )
