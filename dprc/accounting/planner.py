"""Which estimator, how many probes, which sketch: the noise and the work of each choice."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dprc.accounting.queries import noise_multiplier

DEFAULT_PROBES = (16, 32, 64, 128)
# Certified heads of the work of 32 and of 48 probes.
DEFAULT_HEADS = ((2, 26), (2, 42))
# Below this overhead in noise, fewer probes are worth more than less noise.
ACCEPTABLE_OVERHEAD = 0.05
# Work this close is the same work: the noise decides.
_SAME_WORK = 1.01


@dataclass(frozen=True)
class LayerShape:
    """One linear layer: T tokens per sample, weight of shape (out_features, in_features)."""

    tokens: int
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")


@dataclass(frozen=True)
class Option:
    """One way to clip, with what it costs.

    Attributes:
        estimator: ``"exact"``, ``"hutchinson"`` or ``"hutchpp"``.
        num_probes: Of the tail for hutchpp; None for exact clipping.
        head_rank: Of hutchpp, else None.
        sketch: ``"shared"``, ``"per_sample"``, or None.
        analysis: ``"tight"`` or ``"envelope"``.
        noise_multiplier: What reaches the target.
        noise_overhead: noise_multiplier over that of exact clipping, minus 1.
        norm_flops: FLOPs of the norm estimates of one batch over the layers.
        workspace_elements: Largest workspace of a layer, beyond activations and gradients.
    """

    estimator: str
    num_probes: int | None
    head_rank: int | None
    sketch: str | None
    analysis: str
    noise_multiplier: float
    noise_overhead: float
    norm_flops: int
    workspace_elements: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, as values that JSON can hold."""
        return asdict(self)


def compare(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    layers: Sequence[LayerShape] = (),
    batch: int = 1,
    probes: Sequence[int] = DEFAULT_PROBES,
    heads: Sequence[tuple[int, int]] = DEFAULT_HEADS,
    envelope: bool = True,
) -> list[Option]:
    """The noise and the work of exact clipping, of probes × sketch and of heads × sketch.

    Args:
        epsilon: Target.
        delta: Target.
        sample_rate: Poisson inclusion probability.
        steps: Optimizer steps.
        layers: Shapes that decide the work; without any, the work is 0.
        batch: Samples in a physical batch.
        probes: Numbers of probes to consider, without a head.
        heads: Certified pairs (head_rank, num_probes) to consider.
        envelope: Whether to show the paper's analysis as well.

    Returns:
        Exact clipping first, then by number of probes, then the heads.

    Raises:
        ValueError: As ``noise_multiplier``; or batch is not positive.
        PrivacyError: As ``noise_multiplier``; or a head is not certified.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be an int of at least 1, got {batch!r}")

    def noise(**settings: Any) -> float:
        return noise_multiplier(
            epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps, **settings
        )

    exact = noise(estimator="exact")
    flops = sum(2 * batch * s.tokens * s.in_features * s.out_features for s in layers)
    workspace = max((batch * s.in_features * s.out_features for s in layers), default=0)
    options = [Option("exact", None, None, None, "tight", exact, 0.0, flops, workspace)]
    hidden, known = ("per_sample", "tight"), ("shared", "tight")
    paper = [("shared", "envelope")] if envelope else []
    choices = [(0, k, [hidden, known, *paper]) for k in probes]
    choices += [(rank, k, [hidden, known]) for rank, k in heads]
    for rank, k, kinds in choices:
        # Three products of the head's columns and one of the probes; the head's part of the tail.
        flops = sum(
            2 * batch * (s.tokens * (3 * rank + k) + rank * k) * (s.in_features + s.out_features)
            for s in layers
        )
        for sketch, analysis in kinds:
            method: dict[str, Any] = {"estimator": "hutchinson"}
            if rank:
                method = {"estimator": "hutchpp", "head_rank": rank, "require_certified": True}
            sigma = noise(num_probes=k, sketch=sketch, analysis=analysis, **method)
            sketches = batch if sketch == "per_sample" else 1
            workspace = max(
                (
                    (batch * (s.tokens + s.in_features) + sketches * s.out_features) * (rank + k)
                    for s in layers
                ),
                default=0,
            )
            options.append(
                Option(
                    method["estimator"],
                    k,
                    rank or None,
                    sketch,
                    analysis,
                    sigma,
                    sigma / exact - 1,
                    flops,
                    workspace,
                )
            )
    return options


def recommend(options: Sequence[Option], overhead: float = ACCEPTABLE_OVERHEAD) -> Option:
    """The cheapest option whose noise overhead is acceptable; exact clipping if it is cheapest.

    Options that cost more FLOPs than exact clipping are out. Among the rest, those with an
    acceptable overhead the cheapest wins, or what costs at most 1 % more with less noise; if there
    is none, the least noise wins.

    Raises:
        ValueError: There are no options, or exact clipping is not among them.
    """
    exact = [option for option in options if option.estimator == "exact"]
    if not exact:
        raise ValueError("options must hold exact clipping, to compare with")
    known_work = exact[0].norm_flops > 0
    randomized = [
        option
        for option in options
        if option.estimator != "exact"
        and (not known_work or option.norm_flops < exact[0].norm_flops)
    ]
    if not randomized:
        return exact[0]
    acceptable = [option for option in randomized if option.noise_overhead <= overhead]
    if acceptable and not known_work:
        return min(acceptable, key=lambda o: (_probes_worth(o), o.noise_multiplier))
    if acceptable:
        least = min(option.norm_flops for option in acceptable)
        near = [option for option in acceptable if option.norm_flops <= _SAME_WORK * least]
        return min(near, key=lambda o: o.noise_multiplier)
    return min(randomized, key=lambda o: o.noise_multiplier)


def _probes_worth(option: Option) -> int:
    """How many probes without a head take the same products."""
    return (option.num_probes or 0) + 3 * (option.head_rank or 0)


def format_table(options: Sequence[Option]) -> str:
    """The options as an aligned text table."""
    names = "estimator head probes sketch analysis noise overhead GFLOP Melem"
    header = tuple(names.split())
    rows = [
        (
            option.estimator,
            str(option.head_rank or "-"),
            str(option.num_probes or "-"),
            option.sketch or "-",
            option.analysis,
            f"{option.noise_multiplier:.4f}",
            f"{100 * option.noise_overhead:.1f} %",
            f"{option.norm_flops / 1e9:.3g}" if option.norm_flops else "-",
            f"{option.workspace_elements / 1e6:.3g}" if option.workspace_elements else "-",
        )
        for option in options
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def noise_by_epsilon(
    epsilons: Sequence[float], *, delta: float, sample_rate: float, steps: int, num_probes: int = 32
) -> list[dict[str, float]]:
    """Data of the figure noise against ε: one row per ε, one column per analysis.

    Raises:
        ValueError: As ``noise_multiplier``.
    """
    rows = []
    for epsilon in epsilons:
        options = compare(
            epsilon=epsilon,
            delta=delta,
            sample_rate=sample_rate,
            steps=steps,
            probes=(num_probes,),
            heads=(),
        )
        row = {"epsilon": float(epsilon)}
        for option in options:
            name = "exact" if option.sketch is None else f"{option.sketch}_{option.analysis}"
            row[name] = option.noise_multiplier
        rows.append(row)
    return rows
