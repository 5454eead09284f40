"""A plan for private training of a model: costs by layer, peaks of whole steps, and what to use."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from dprc import accounting, estimators
from dprc.accounting import planner
from dprc.estimators.deterministic import TILE_ROWS
from dprc.profiling.flops import LayerShape
from dprc.profiling.layer_memory import layer_memory
from dprc.profiling.memory import EXCLUDED, Step, Workbench, simulate_step
from dprc.profiling.presets import ModelShape

# A deeper model is weighed at these two depths: each phase's peak is affine in the depth.
DEPTHS = (2, 4)
# A larger batch is weighed at these two sizes, for the same reason. Longer samples are not: which
# moment is a phase's peak changes with the length.
BATCHES = (8, 16)


@dataclass(frozen=True)
class Target:
    """A privacy target.

    Args:
        epsilon: ε.
        delta: δ.
        sample_rate: Poisson inclusion probability q.
        steps: Optimizer steps.
    """

    epsilon: float
    delta: float
    sample_rate: float
    steps: int


def step_peak(config: Any, step: Step) -> dict[str, Any]:
    """Return a step's peak, weighed at small depths and batches where the model is large.

    Returns:
        ``peak_bytes``, ``phase``, and ``extrapolated_from``: None if the step itself was simulated,
        else what was. Each phase's peak is taken to be affine in each.
    """
    if step.batch > BATCHES[-1]:
        low, high = (step_peak(config, replace(step, batch=batch)) for batch in BATCHES)
        phases = _extend(low["peak_by_phase"], high["peak_by_phase"], BATCHES, step.batch)
        return _of_phases(phases, {**(high["extrapolated_from"] or {}), "batch": list(BATCHES)})
    depth = int(config.num_hidden_layers)
    if depth <= DEPTHS[-1] or len(set(getattr(config, "layer_types", None) or ())) > 1:
        memory = simulate_step(config, step)
        return _of_phases(memory.peak_by_phase, None)
    few, more = (simulate_step(_with_depth(config, layers), step) for layers in DEPTHS)
    phases = _extend(few.peak_by_phase, more.peak_by_phase, DEPTHS, depth)
    return _of_phases(phases, {"layers": list(DEPTHS)})


def _extend(
    low: dict[str, int], high: dict[str, int], points: tuple[int, int], at: int
) -> dict[str, int]:
    first, second = points
    return {
        phase: high[phase] + (high[phase] - low[phase]) * (at - second) // (second - first)
        for phase in high
        if phase in low
    }


def _of_phases(phases: dict[str, int], origin: dict[str, Any] | None) -> dict[str, Any]:
    phase = max(phases, key=lambda name: phases[name])
    return {
        "peak_bytes": phases[phase],
        "phase": phase,
        "peak_by_phase": phases,
        "extrapolated_from": origin,
    }


def _with_depth(config: Any, layers: int) -> Any:
    shallow = deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:layers]
    return shallow


def matrices(config: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the shapes of a model's linear layers and its number of trained parameters.

    Returns:
        Rows with ``in_features``, ``out_features``, ``count`` and ``example`` (a name), in the
        model's order; and the number of parameters.
    """
    bench = Workbench(
        config,
        Step(tokens=2, estimator="hutchinson", optimizer="sgd"),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in [] if bench.engine is None else bench.engine.plan():
        kinds = row["captured_as"].split("+")
        if len(row["shape"]) != 2 or not {"linear", "transposedlinear"} & set(kinds):
            continue
        first, second = row["shape"]
        key = (first, second) if "transposedlinear" in kinds else (second, first)
        shape = {"in_features": key[0], "out_features": key[1], "count": 0, "example": row["name"]}
        found.setdefault(key, shape)["count"] += 1
    return list(found.values()), sum(p.numel() for p in bench.model.parameters())


def layer_table(
    shapes: Sequence[dict[str, Any]], *, tokens: int, batch: int, num_probes: int, sketch: str,
    dtype: str, head_rank: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of ``shapes`` with what each estimator costs one layer.

    Returns:
        Each row with ``estimators``: name -> ``flops`` and ``workspace_bytes`` (beyond activations
        and output gradients, simulated).
    """
    rows = []
    for shape in shapes:
        layer = LayerShape(shape["in_features"], shape["out_features"], tokens, batch)
        costs = {}
        for name in estimators.names():
            rank = head_rank if name == "hutchpp" else None
            estimator = estimators.get(name, num_probes=num_probes, sketch=sketch, head_rank=rank)
            flops = estimator.flops(batch, tokens, layer.in_features, layer.out_features)
            # All tiles are alike: a few stand for those of a vocabulary.
            few = min(layer.out_features, 4 * TILE_ROWS) if name == "tiled" else layer.out_features
            memory = layer_memory(estimator, replace(layer, out_features=few), dtype=dtype)
            costs[name] = {"flops": flops, "workspace_bytes": memory.workspace_bytes}
        rows.append({**shape, "estimators": costs})
    return rows


def make_plan(
    shape: ModelShape,
    *,
    tokens: int,
    batch: int,
    dtype: str = "fp32",
    checkpointing: bool = False,
    memory_bytes: int | None = None,
    target: Target | None = None,
    head: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Plan private training of a model.

    Args:
        shape: Of the model.
        tokens: Of each sample.
        batch: Samples wanted in a physical batch.
        dtype: ``"fp32"`` or ``"bf16"``.
        checkpointing: Whether the reported peaks are with gradient checkpointing.
        memory_bytes: What there is; None plans without a limit.
        target: Chooses the number of probes by the noise it costs; None takes 32.
        head: Plan for hutchpp with this (head_rank, num_probes) instead of choosing.

    Returns:
        ``layers``, ``head_rank`` (None without a head), ``peak_bytes`` (by schedule, and
        ``nonprivate``), ``peaks`` (the same with phase and ratio), ``recommendation``, ``excluded``
        (what the peaks do not hold) and ``notes``.

    Raises:
        ValueError: A model that cannot be planned, or a number out of range.
        PrivacyError: The engine refuses the model, or the target cannot be reached.
    """
    config = shape.config()
    step = Step(tokens=tokens, batch=batch, dtype=dtype, checkpointing=checkpointing)
    shapes, parameters = matrices(config)
    clipping = (
        _choose_clipping(shapes, tokens, batch, target)
        if head is None
        else _with_head(head, target)
    )
    k, sketch = clipping["num_probes"] or 32, clipping["sketch"] or "per_sample"
    rank = clipping["head_rank"]
    layers = layer_table(
        shapes, tokens=tokens, batch=batch, num_probes=k, sketch=sketch, dtype=dtype,
        head_rank=rank,
    )  # fmt: skip
    private = replace(
        step, estimator=clipping["estimator"], num_probes=k, sketch=sketch, head_rank=rank
    )
    peaks = {
        "nonprivate": step_peak(config, step),
        "two_pass": step_peak(config, private),
        "book_keeping": step_peak(config, replace(private, schedule="book_keeping")),
    }
    reference = peaks["nonprivate"]["peak_bytes"]
    for row in peaks.values():
        row["ratio_to_nonprivate"] = row["peak_bytes"] / reference
    return {
        "model": shape.name,
        "parameters": parameters,
        "tokens": tokens,
        "batch": batch,
        "dtype": dtype,
        "checkpointing": checkpointing,
        "optimizer": step.optimizer,
        "num_probes": k,
        "sketch": sketch,
        "head_rank": rank,
        "layers": layers,
        "peak_bytes": {name: row["peak_bytes"] for name, row in peaks.items()},
        "peaks": peaks,
        "recommendation": {**clipping, **_choose_schedule(config, private, memory_bytes, peaks)},
        "excluded": list(EXCLUDED),
        "notes": _notes(shape, tokens, clipping),
    }


def _notes(shape: ModelShape, tokens: int, clipping: dict[str, Any]) -> list[str]:
    notes = ["samples without padding: a padding mask would add a (tokens, tokens) matrix"]
    if clipping["estimator"] == "hutchpp":
        several = estimators.get(
            "hutchpp", num_probes=clipping["num_probes"], head_rank=clipping["head_rank"]
        ).of_several_uses()
        notes.append(
            "parameters with several uses, as the head of the chunked loss, take hutchinson with "
            f"{getattr(several, 'num_probes', 0)} probes, which the noise covers"
        )
    limit = shape.max_tokens
    if limit is not None and tokens > limit:
        notes.append(f"warning: {tokens} tokens are more than the model's {limit} positions")
    return notes


def _choose_clipping(
    shapes: Sequence[dict[str, Any]], tokens: int, batch: int, target: Target | None
) -> dict[str, Any]:
    """Choose estimator, probes and sketch: by noise and work for a target, else by work alone."""
    each = [(s["in_features"], s["out_features"]) for s in shapes for _ in range(s["count"])]
    if target is not None:
        options = planner.compare(
            epsilon=target.epsilon,
            delta=target.delta,
            sample_rate=target.sample_rate,
            steps=target.steps,
            layers=[planner.LayerShape(tokens, d, p) for d, p in each],
            batch=batch,
            envelope=False,
        )
        chosen = planner.recommend(options).as_dict()
        return {
            name: chosen.get(name)
            for name in (
                "estimator",
                "num_probes",
                "head_rank",
                "sketch",
                "analysis",
                "noise_multiplier",
                "noise_overhead",
            )
        }
    work = {
        name: sum(estimators.get(name).flops(batch, tokens, d, p) for d, p in each)
        for name in ("ghost", "exact", "hutchinson")
    }
    best = min(work, key=lambda name: work[name])
    randomized = best == "hutchinson"
    return {
        "estimator": best,
        "num_probes": 32 if randomized else None,
        "head_rank": None,
        "sketch": "per_sample" if randomized else None,
    }


def _with_head(head: tuple[int, int], target: Target | None) -> dict[str, Any]:
    """Take hutchpp with a given head, and say what noise it costs."""
    clipping: dict[str, Any] = {
        "estimator": "hutchpp",
        "num_probes": head[1],
        "head_rank": head[0],
        "sketch": "per_sample",
    }
    estimators.get("hutchpp", num_probes=head[1], head_rank=head[0])  # refuses what is no count
    if target is None:
        return clipping
    exact = accounting.noise_multiplier(**asdict(target), estimator="exact")
    noise = accounting.noise_multiplier(**asdict(target), **clipping)
    costs = {"noise_multiplier": noise, "noise_overhead": noise / exact - 1}
    return {**clipping, "analysis": "tight", **costs}


def _choose_schedule(
    config: Any, private: Step, memory_bytes: int | None, peaks: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Take the fastest way whose memory holds at least one sample, and as many as fit."""
    known = {replace(private, schedule=name): peaks[name] for name in ("two_pass", "book_keeping")}

    def peak(step: Step) -> int:
        if step not in known:
            known[step] = step_peak(config, step)
        return int(known[step]["peak_bytes"])

    # In this order of time: one backward pass; two; two, and the forward pass twice more.
    ways = [
        replace(private, schedule="book_keeping", checkpointing=False),
        replace(private, schedule="two_pass", checkpointing=False),
        replace(private, schedule="two_pass", checkpointing=True),
    ]
    for way in ways:
        fits = way.batch if memory_bytes is None else _largest_batch(way, memory_bytes, peak)
        if fits:
            answer = {
                "schedule": way.schedule,
                "checkpointing": way.checkpointing,
                "loss": "chunked",
                "chunk_tokens": way.chunk_tokens,
                "physical_batch": fits,
                "peak_bytes": peak(replace(way, batch=fits)),
            }
            return {**answer, "fits": True} if memory_bytes is not None else answer
    smallest = peak(replace(ways[-1], batch=1))
    return {
        "schedule": "two_pass",
        "checkpointing": True,
        "loss": "chunked",
        "chunk_tokens": private.chunk_tokens,
        "physical_batch": None,
        "peak_bytes": smallest,
        "fits": False,
    }


def _largest_batch(way: Step, memory_bytes: int, peak_fn: Any) -> int:
    """Return the most samples, up to those wanted, whose step fits; 0 if one does not."""
    if peak_fn(way) <= memory_bytes:
        return way.batch
    low = 0
    high = way.batch  # does not fit
    if high > 2:
        one, two = (peak_fn(replace(way, batch=batch)) for batch in (1, 2))
        if one > memory_bytes:
            return 0
        low = 1
        guess = 1 + (memory_bytes - one) // max(two - one, 1)
    else:
        guess = 1
    while high - low > 1 or low == 0:
        guess = min(max(guess, low + 1), high - 1) if high - 1 > low else 0
        if guess == 0:
            return low
        if peak_fn(replace(way, batch=guess)) <= memory_bytes:
            low, guess = guess, guess + 1
        else:
            high, guess = guess, guess - 1
    return low
