"""Which estimator, how many probes, which sketch: the noise and the work of each choice."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dprc.accounting.queries import noise_multiplier

DEFAULT_PROBES = (16, 32, 64, 128)
# Below this overhead in noise, fewer probes are worth more than less noise.
ACCEPTABLE_OVERHEAD = 0.05


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
        estimator: ``"exact"`` or ``"hutchinson"``.
        num_probes: None for exact clipping.
        sketch: ``"shared"``, ``"per_sample"``, or None.
        analysis: ``"tight"`` or ``"envelope"``.
        noise_multiplier: What reaches the target.
        noise_overhead: noise_multiplier over that of exact clipping, minus 1.
        norm_flops: FLOPs of the norm estimates of one batch over the layers.
        workspace_elements: Largest workspace of a layer, beyond activations and gradients.
    """

    estimator: str
    num_probes: int | None
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
    envelope: bool = True,
) -> list[Option]:
    """The noise and the work of exact clipping and of probes × sketch for one privacy target.

    Args:
        epsilon: Target.
        delta: Target.
        sample_rate: Poisson inclusion probability.
        steps: Optimizer steps.
        layers: Shapes that decide the work; without any, the work is 0.
        batch: Samples in a physical batch.
        probes: Numbers of probes to consider.
        envelope: Whether to show the paper's analysis as well.

    Returns:
        Exact clipping first, then by number of probes.

    Raises:
        ValueError: As ``noise_multiplier``; or batch is not positive.
        PrivacyError: As ``noise_multiplier``.
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
    options = [Option("exact", None, None, "tight", exact, 0.0, flops, workspace)]
    kinds = [("per_sample", "tight"), ("shared", "tight")]
    if envelope:
        kinds.append(("shared", "envelope"))
    for k in probes:
        flops = sum(2 * batch * s.tokens * k * (s.in_features + s.out_features) for s in layers)
        for sketch, analysis in kinds:
            sigma = noise(num_probes=k, sketch=sketch, analysis=analysis)
            sketches = batch if sketch == "per_sample" else 1
            workspace = max(
                (
                    batch * k * (s.tokens + s.in_features) + sketches * s.out_features * k
                    for s in layers
                ),
                default=0,
            )
            options.append(
                Option(
                    "hutchinson", k, sketch, analysis, sigma, sigma / exact - 1, flops, workspace
                )
            )
    return options


def recommend(options: Sequence[Option], overhead: float = ACCEPTABLE_OVERHEAD) -> Option:
    """The cheapest option whose noise overhead is acceptable; exact clipping if it is cheapest.

    Options that cost more FLOPs than exact clipping are out. Among the rest, those with an
    acceptable overhead are ordered by FLOPs, then by noise; if there is none, the least noise wins.

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
    if acceptable:
        return min(acceptable, key=lambda o: (o.norm_flops, o.num_probes, o.noise_multiplier))
    return min(randomized, key=lambda o: o.noise_multiplier)


def format_table(options: Sequence[Option]) -> str:
    """The options as an aligned text table."""
    header = ("estimator", "probes", "sketch", "analysis", "noise", "overhead", "GFLOP", "Melem")
    rows = [
        (
            option.estimator,
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
        )
        row = {"epsilon": float(epsilon)}
        for option in options:
            name = "exact" if option.sketch is None else f"{option.sketch}_{option.analysis}"
            row[name] = option.noise_multiplier
        rows.append(row)
    return rows
