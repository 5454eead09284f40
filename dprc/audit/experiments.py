"""What is run on the engine: noisy steps on a pair, steps that show its structure, a whole run."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dprc.accounting import Accountant
from dprc.audit.rig import (
    BIAS,
    CANARY_NORM,
    HEAD,
    MATRIX,
    OTHERS,
    WITNESS_NORM,
    ProgressFn,
    Rig,
    Samples,
    build_rig,
    rig_width,
)
from dprc.audit.settings import AuditSettings
from dprc.errors import PrivacyError

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# A step without any witness would hide a shared sketch from an adversary who knows it.
_NO_WITNESS = 1e-4
# Samples of a step whose structure is looked at, and the micro-batches they are cut into.
SAMPLES, CUTS = 8, (1, 2, 4)
_OTHER_NORM = 3.0


@dataclass(frozen=True)
class Record:
    """What the engine's accountant recorded: the claim that is audited.

    Attributes:
        steps: Steps recorded.
        kinds: Number of different kinds of steps; one, where all was as announced.
        event: The settings of the first kind, as ``Accountant.state_dict`` gives them.
    """

    steps: int
    kinds: int
    event: dict[str, Any]

    @classmethod
    def of(cls, rig: Rig) -> "Record":
        """Read an engine's accountant."""
        entries = rig.engine.accountant.state_dict()["steps"]
        if not entries:
            raise PrivacyError("audit: the engine accounted for no step at all")
        event = {key: value for key, value in entries[0].items() if key != "count"}
        return cls(rig.engine.accountant.steps, len(entries), event)

    def epsilon(self, delta: float, steps: int = 1) -> float:
        """Return the ε claimed for so many steps."""
        accountant = Accountant()
        accountant.load_state_dict({"version": 1, "steps": [{**self.event, "count": steps}]})
        return accountant.epsilon(delta)

    @property
    def noise_multiplier(self) -> float:
        """σ that was accounted for."""
        return float(self.event["noise_multiplier"])

    @property
    def sample_rate(self) -> float:
        """Q that was accounted for."""
        return float(self.event["sample_rate"])

    @property
    def num_probes(self) -> int | None:
        """K of the law that was accounted for; None where the norm counts as exact."""
        probes = self.event["law"]["num_probes"]
        return None if probes is None else int(probes)

    @property
    def sketch(self) -> str | None:
        """Who sees the sketch, as accounted for; None where the norm counts as exact."""
        return None if self.num_probes is None else str(self.event["sketch"])


@dataclass(frozen=True)
class PairTrials:
    """Noisy steps, each in a world with or without the canary.

    Attributes:
        present: (trials,), an independent fair coin each.
        outputs: (trials,), the sum along the canary's direction, in units of the noise.
        ratios: (trials,), estimated over true squared norm in the canary's direction, where a
            witness (or, without witnesses, the canary) was drawn; NaN elsewhere.
        batch_sizes: (trials,), samples that were drawn.
        dataset_sizes: (trials,), samples they were drawn from.
        record: What was accounted.
        optimizer_steps: Steps that the optimizer saw.
    """

    present: Flags
    outputs: Array
    ratios: Array
    batch_sizes: Array
    dataset_sizes: Array
    record: Record
    optimizer_steps: int


def run_pairs(
    settings: AuditSettings, noise_multiplier: float, progress_fn: ProgressFn
) -> PairTrials:
    """Take one noisy step after another on the worst pair of data sets, through the loader.

    Others are fixed samples whose gradients are orthogonal to the canary's. With a shared sketch,
    witnesses share its direction at a vanishing norm, and so show its ratio in both worlds.
    """
    rig = build_rig(settings, noise_multiplier, head=False, stream=1)
    maker, rate = rig.maker, settings.sample_rate
    witnesses = 0
    if settings.sketch == "shared":
        witnesses = 1 if rate == 1 else math.ceil(math.log(_NO_WITNESS) / math.log1p(-rate))
    corner = maker.width - OTHERS
    others = [maker.at_entry(corner + i, corner + i, _OTHER_NORM) for i in range(OTHERS)]
    samples = Samples.stacked(
        [
            *others,
            *[maker.in_matrix(WITNESS_NORM)] * witnesses,
            maker.in_matrix(CANARY_NORM),
        ]
    )
    # Data sets of indices: what they stand for is gathered batch by batch.
    worlds = (range(len(samples) - 1), range(len(samples)))
    coins = np.random.default_rng(settings.seed).random(settings.trials) < 0.5
    outputs, ratios, sizes = (np.full(settings.trials, math.nan) for _ in range(3))
    # Who shows the ratio: a witness, or else the canary itself.
    shown = range(OTHERS, OTHERS + max(1, witnesses))
    squared_norm = (WITNESS_NORM if witnesses else CANARY_NORM) ** 2
    for trial, present in enumerate(coins):
        if trial % 5000 == 0:
            progress_fn(f"step {trial} of {settings.trials} on the pair")
        (batch,) = rig.engine.poisson_loader(
            worlds[int(present)], steps=1, max_physical_batch=len(samples), collate_fn=list
        )
        sizes[trial] = len(batch)
        for indices in batch:
            rig.backward(samples.at(indices))
            seen = [place for place, index in enumerate(indices) if index in shown]
            if seen:
                ratios[trial] = float(rig.ratios()[seen[0]]) / squared_norm
        rig.engine.step()
        outputs[trial] = maker.along(MATRIX, rig.recorder.released[0])
    record = Record.of(rig)
    return PairTrials(
        present=coins,
        outputs=outputs / record.noise_multiplier,
        ratios=ratios,
        batch_sizes=sizes,
        dataset_sizes=np.where(coins, len(samples), len(samples) - 1).astype(float),
        record=record,
        optimizer_steps=rig.recorder.taken,
    )


@dataclass(frozen=True)
class Structure:
    """What steps of known samples show of sketches, noise and clipping.

    Attributes:
        cuts: (steps,), into how many micro-batches each step was cut.
        ratios: (steps, SAMPLES), of samples with the same gradient.
        noise: By number of micro-batches (0 for empty batches): (steps, entries) of the sum where
            no gradient reaches.
        noise_by_parameter: The same of empty batches for each parameter.
        contributions: By parameter: (steps,), the sum along a canary in that parameter alone.
        record: What was accounted.
        optimizer_steps: Steps that the optimizer saw.
        refused: Whether a step of the optimizer outside the engine was refused.
        moved: Whether that attempt reached the optimizer.
    """

    cuts: npt.NDArray[np.int64]
    ratios: Array
    noise: dict[int, Array]
    noise_by_parameter: dict[str, Array]
    contributions: dict[str, Array]
    record: Record
    optimizer_steps: int
    refused: bool
    moved: bool


def run_structure(
    settings: AuditSettings, noise_multiplier: float, progress_fn: ProgressFn
) -> Structure:
    """Take steps on equal samples, cut in several ways, on none, and on canaries by parameter."""
    rig = build_rig(settings, noise_multiplier, head=True, stream=2)
    maker, steps = rig.maker, settings.structure_steps
    names = [name for name, _ in rig.model.named_parameters()]
    untouched = maker.untouched()
    equal = Samples.stacked([maker.in_matrix(CANARY_NORM)] * SAMPLES)
    cuts: list[int] = []
    ratios: list[Array] = []
    noise: dict[int, list[Array]] = {count: [] for count in (0, *CUTS)}
    for _ in range(steps):
        for count in CUTS:
            seen = []
            for part in torch.arange(SAMPLES).chunk(count):
                rig.backward(equal.at(part.tolist()))
                seen.append(rig.ratios() / CANARY_NORM**2)
            rig.engine.step()
            cuts.append(count)
            ratios.append(torch.cat(seen).numpy())
            noise[count].append(rig.recorder.released[0][untouched].double().numpy())
    progress_fn(f"{3 * steps} steps in micro-batches done")
    by_parameter: dict[str, list[Array]] = {name: [] for name in names}
    for _ in range(steps):
        rig.engine.step()
        noise[0].append(rig.recorder.released[0][untouched].double().numpy())
        for name, grad in zip(names, rig.recorder.released, strict=True):
            by_parameter[name].append(grad.flatten().double().numpy())
    canaries = {
        MATRIX: maker.in_matrix(CANARY_NORM),
        HEAD: maker.in_head(CANARY_NORM),
        BIAS: maker.in_bias(CANARY_NORM),
    }
    contributions: dict[str, Array] = {}
    for name, canary in canaries.items():
        found = np.empty(steps)
        for step in range(steps):
            rig.backward(canary)
            rig.engine.step()
            found[step] = maker.along(name, rig.recorder.released[names.index(name)])
        contributions[name] = found
    refused, moved = attempt_foreign_step(rig)
    return Structure(
        cuts=np.array(cuts),
        ratios=np.stack(ratios),
        noise={count: np.stack(rows) for count, rows in noise.items()},
        noise_by_parameter={name: np.stack(rows) for name, rows in by_parameter.items()},
        contributions=contributions,
        record=Record.of(rig),
        optimizer_steps=rig.recorder.taken - int(moved),
        refused=refused,
        moved=moved,
    )


def attempt_foreign_step(rig: Rig) -> tuple[bool, bool]:
    """Step the optimizer outside the engine: (whether it was refused, whether it went through)."""
    before = rig.recorder.taken
    for parameter in rig.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    refused = False
    try:
        rig.recorder.step()
    except PrivacyError:
        refused = True
    finally:
        for parameter in rig.model.parameters():
            parameter.grad = None
    return refused, rig.recorder.taken > before


@dataclass(frozen=True)
class Run:
    """One training run with canaries.

    Attributes:
        included: (canaries,), an independent fair coin each.
        scores: (canaries,), what all steps released along each canary's direction.
        record: What was accounted.
        optimizer_steps: Steps that the optimizer saw.
    """

    included: Flags
    scores: Array
    record: Record
    optimizer_steps: int


def run_training(settings: AuditSettings, noise_multiplier: float, progress_fn: ProgressFn) -> Run:
    """Train once on canaries with orthogonal gradients, each in the data by a fair coin."""
    width = max(math.isqrt(settings.canaries - 1) + 1, rig_width(settings))
    rig = build_rig(settings, noise_multiplier, head=False, stream=3, width=width)
    entries = [divmod(index, width) for index in range(settings.canaries)]
    samples = Samples.stacked([rig.maker.at_entry(r, c, CANARY_NORM) for r, c in entries])
    rng = np.random.default_rng(None if settings.seed is None else [settings.seed, 1])
    included = rng.random(settings.canaries) < 0.5
    chosen = np.flatnonzero(included)
    total = torch.zeros(width, width, dtype=torch.float64)
    loader = rig.engine.poisson_loader(
        range(len(chosen)),
        steps=settings.run_steps,
        max_physical_batch=256,
        collate_fn=list,
    )
    for batch in loader:
        for indices in batch:
            rig.backward(samples.at(chosen[indices].tolist()))
        rig.engine.step()
        total += rig.recorder.released[0].double()
    progress_fn(f"a run of {settings.run_steps} steps with {settings.canaries} canaries done")
    rows, columns = np.array(entries).T
    return Run(
        included=included,
        scores=total.numpy()[rows, columns],
        record=Record.of(rig),
        optimizer_steps=rig.recorder.taken,
    )
