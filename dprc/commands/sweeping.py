"""``dprc sweep-noise`` and ``dprc envelope``: accounting at many settings, for figures."""

import argparse
from typing import Any

from dprc.commands.options import add_output, add_run, counts, numbers, report_rows


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of this group."""
    sweep = subparsers.add_parser(
        "sweep-noise",
        help="noise multipliers over budgets and probe counts, in every analysis",
        description=(
            "Calibrate exact clipping and each sketch and analysis at every budget and probe count."
        ),
        epilog=(
            "example: dprc sweep-noise --epsilons 2,9 --num-probes 16,32 --delta 1e-5"
            " --sample-rate 0.01 --steps 1000"
        ),
    )
    add = sweep.add_argument
    add("--epsilons", required=True, metavar="E,E", help="privacy budgets")
    add("--num-probes", default="32", metavar="K,K", help="default: 32")
    add_run(sweep)
    add_output(sweep)
    sweep.set_defaults(run=_sweep_noise)

    envelope = subparsers.add_parser(
        "envelope",
        help="the paper's bound on the CDF of an estimated norm, by rank",
        description=(
            "Tabulate the largest probability, over all gradients of a rank, that the estimated "
            "squared norm is below so much of the true one."
        ),
        epilog="example: dprc envelope --num-probes 32 --ranks 1,4,64 --lowest 0.5 --highest 1.5",
    )
    add = envelope.add_argument
    add("--num-probes", type=int, default=32, metavar="K", help="default: 32")
    add("--ranks", default="1,2,4,16,64", metavar="D,D", help="default: 1,2,4,16,64")
    add("--lowest", type=float, default=0.4, metavar="X", help="ratio, above 0 (default: 0.4)")
    add("--highest", type=float, default=1.8, metavar="X", help="ratio (default: 1.8)")
    add("--points", type=int, default=15, metavar="N", help="even, at least 2 (default: 15)")
    add_output(envelope)
    envelope.set_defaults(run=_envelope)


def _sweep_noise(arguments: argparse.Namespace) -> None:
    epsilons = numbers("--epsilons", arguments.epsilons)
    num_probes = counts("--num-probes", arguments.num_probes)

    from dprc.accounting import planner

    settings = {name: getattr(arguments, name) for name in ("delta", "sample_rate", "steps")}
    rows: list[dict[str, Any]] = []
    for epsilon in epsilons:
        # Heads are compared by noise-by-work, where they stand beside what costs the same work.
        options = planner.compare(epsilon=epsilon, probes=num_probes, heads=(), **settings)
        for option in options:
            work = ("norm_flops", "workspace_elements")
            noise = {k: v for k, v in option.as_dict().items() if k not in work}
            rows.append({"epsilon": epsilon, **noise})
    config = {"epsilons": epsilons, "num_probes": num_probes, **settings}
    lines = [
        f"epsilon {row['epsilon']:<6g} {row['estimator']:<11}{row['num_probes'] or '-':>5}  "
        f"{row['sketch'] or '-':<11}{row['analysis']:<9} sigma {row['noise_multiplier']:.4f}  "
        f"{100 * row['noise_overhead']:+.1f} %"
        for row in rows
    ]
    report_rows(arguments, config, rows, lines, made_by="calibration")


def _envelope(arguments: argparse.Namespace) -> None:
    ranks, points = counts("--ranks", arguments.ranks), arguments.points
    low, high = arguments.lowest, arguments.highest
    if not 0 < low < high:
        raise ValueError(f"--lowest, --highest: must be above 0 and in order, got {low}, {high}")
    if points < 2:
        raise ValueError(f"--points: must be at least 2, got {points}")
    ratios = [round(low + (high - low) * place / (points - 1), 9) for place in range(points)]

    from dprc.accounting.envelope import envelope_cdf

    k = arguments.num_probes
    rows = [
        {"num_probes": k, "rank": rank, "ratio": ratio, "cdf": envelope_cdf(ratio, k, rank)}
        for rank in ranks
        for ratio in ratios
    ]
    config = {"num_probes": k, "ranks": ranks, "lowest": low, "highest": high, "points": points}
    lines = [f"rank {row['rank']:<6} ratio {row['ratio']:<8g} {row['cdf']:.6g}" for row in rows]
    report_rows(arguments, config, rows, lines, made_by="envelope")
