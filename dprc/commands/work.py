"""``dprc noise-by-work``: what clipping costs in noise, for equal operations of the norm pass."""

import argparse
from typing import Any

from dprc.commands.options import add_output, add_run, counts, numbers, report_rows

# Sketch and analysis of Hutchinson's estimator: the paper's, and the two that are tight.
_HUTCHINSON = (("shared", "envelope"), ("shared", "tight"), ("per_sample", "tight"))


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of this group."""
    parser = subparsers.add_parser(
        "noise-by-work",
        help="noise of each mechanism for equal operations of the norm pass",
        description=(
            "Calibrate Hutchinson's estimator with so many probes, and Hutch++ with every "
            "certified head of rank r and k tail probes, which costs the operations of 3r + k."
        ),
        epilog=(
            "example: dprc noise-by-work --epsilons 2,9 --work 16,32,64 --delta 1e-5"
            " --sample-rate 0.01 --steps 1000"
        ),
    )
    add = parser.add_argument
    add("--epsilons", required=True, metavar="E,E", help="privacy budgets")
    add("--work", default="32,64,128", metavar="W,W", help="in probes (default: 32,64,128)")
    add_run(parser)
    add_output(parser)
    parser.set_defaults(run=_noise_by_work)


def noise_by_work(
    epsilons: list[float], work: list[int], *, delta: float, sample_rate: float, steps: int
) -> list[dict[str, Any]]:
    """Calibrate every mechanism at every budget.

    Args:
        epsilons: Privacy budgets.
        work: Probes of Hutchinson's estimator. Heads that cost more than the largest are left out.
        delta: In (0, 1).
        sample_rate: Poisson inclusion probability.
        steps: Optimizer steps.

    Returns:
        A row for each budget and mechanism: ``epsilon``, ``estimator``, ``num_probes``,
        ``head_rank``, ``sketch``, ``analysis``, ``work`` (operations of the norm pass in units of
        2BT(d+p), None for exact clipping), ``noise_multiplier`` and ``noise_overhead`` over exact
        clipping.

    Raises:
        ValueError: As ``dprc.accounting.noise_multiplier``.
        PrivacyError: As there.
    """
    from dprc import accounting
    from dprc.accounting.small_head import certified_pairs

    mechanisms: list[tuple[int, dict[str, Any]]] = [
        (probes, _mechanism("hutchinson", probes, None, sketch, analysis))
        for probes in work
        for sketch, analysis in _HUTCHINSON
    ]
    mechanisms += [
        (3 * rank + probes, _mechanism("hutchpp", probes, rank, "per_sample", "tight"))
        for rank, probes in certified_pairs()
        if 3 * rank + probes <= max(work)
    ]
    rows = []
    for epsilon in epsilons:
        run: dict[str, Any] = {"delta": delta, "sample_rate": sample_rate, "steps": steps}
        run["epsilon"] = epsilon
        exact = accounting.noise_multiplier(**run, estimator="exact")
        nothing = dict.fromkeys(("num_probes", "head_rank", "sketch", "analysis", "work"))
        noise: dict[str, Any] = {"noise_multiplier": exact, "noise_overhead": 0.0}
        rows.append({"epsilon": epsilon, "estimator": "exact", **nothing, **noise})
        for cost, mechanism in mechanisms:
            sigma = accounting.noise_multiplier(**run, **mechanism)
            noise = {"noise_multiplier": sigma, "noise_overhead": sigma / exact - 1}
            rows.append({"epsilon": epsilon, **mechanism, "work": cost, **noise})
    return rows


def _mechanism(
    estimator: str, num_probes: int, head_rank: int | None, sketch: str, analysis: str
) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "num_probes": num_probes,
        "head_rank": head_rank,
        "sketch": sketch,
        "analysis": analysis,
    }


def _noise_by_work(arguments: argparse.Namespace) -> None:
    epsilons = numbers("--epsilons", arguments.epsilons)
    work = counts("--work", arguments.work)
    run = {name: getattr(arguments, name) for name in ("delta", "sample_rate", "steps")}
    rows = noise_by_work(epsilons, work, **run)
    config = {"epsilons": epsilons, "work": work, **run}
    report_rows(arguments, config, rows, [_in_words(row) for row in rows], made_by="calibration")


def _in_words(row: dict[str, Any]) -> str:
    noise = f"sigma {row['noise_multiplier']:.4f}  {100 * row['noise_overhead']:+.1f} %"
    if row["work"] is None:
        return f"epsilon {row['epsilon']:<6g} {'exact':<51}{noise}"
    head = "" if row["head_rank"] is None else f"r={row['head_rank']} "
    probes = f"{head}k={row['num_probes']}"
    return (
        f"epsilon {row['epsilon']:<6g} {row['estimator']:<11}{probes:<10}"
        f"{row['sketch']:<11}{row['analysis']:<9} work {row['work']:<5}{noise}"
    )
