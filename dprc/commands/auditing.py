"""``dprc audit``."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dprc.audit import AuditReport

_REFUTED = 1


def add_parsers(subparsers: Any) -> None:
    """Add the parser of this group."""
    audit = subparsers.add_parser(
        "audit",
        help="attack the engine: what of the claimed epsilon can be shown",
        description=(
            "Run the real engine on inputs that are worst for it, attack what it releases, and "
            "report a lower bound on epsilon beside the claim. Exit code 1 if the claim is refuted."
        ),
        epilog="example: dprc audit --estimator hutchinson --sketch shared",
    )
    add = audit.add_argument
    add("--estimator", default="hutchinson", help="exact, ghost, tiled, hutchinson, hutchpp")
    add("--num-probes", type=int, default=32, metavar="K", help="default 32")
    add("--head-rank", type=int, metavar="R", help="hutchpp only")
    add("--sketch", default="per_sample", help="per_sample (default) or shared")
    add("--analysis", default="tight", help="tight (default) or envelope")
    add("--schedule", default="two_pass", help="two_pass (default) or book_keeping")
    add("--epsilon", type=float, default=2.0, metavar="E", help="claim of one step; default 2")
    add("--delta", type=float, default=1e-2, metavar="D", help="its delta; default 0.01")
    add("--sample-rate", type=float, default=1.0, metavar="Q", help="of the step; default 1")
    add("--trials", type=int, default=30_000, metavar="N", help="noisy steps; default 30000")
    add("--structure-steps", type=int, default=150, metavar="N", help="for detectors; default 150")
    add("--canaries", type=int, default=1000, metavar="M", help="of the whole run; 0: no run")
    add("--run-steps", type=int, default=8, metavar="N", help="of the whole run; default 8")
    add("--confidence", type=float, default=0.95, metavar="P", help="of everything together")
    add("--seed", type=int, metavar="S", help="repeat an audit; default: fresh randomness")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", metavar="FILE", help="write a result file")
    audit.set_defaults(run=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from dprc.audit import AuditSettings, audit
    from dprc.results import write_result

    chosen = vars(arguments)
    config = {name: chosen[name] for name in AuditSettings.__dataclass_fields__ if name in chosen}
    report = audit(AuditSettings(**config), progress_fn=lambda text: print(text, file=sys.stderr))
    found = report.as_dict()
    if arguments.out:
        mechanism = ("delta", "sample_rate", "estimator", "num_probes", "sketch", "analysis")
        write_result(
            arguments.out,
            config=config,
            metrics=found,
            privacy={
                "epsilon": report.epsilon_claimed,
                "noise_multiplier": report.noise_multiplier,
                "steps": 1,
                **{name: config[name] for name in mechanism},
            },
            valid=not report.refuted,
            made_by="audit",
        )
    print(json.dumps(found, indent=2, allow_nan=False) if arguments.json else _table(report))
    return _REFUTED if report.refuted else 0


def _table(report: "AuditReport") -> str:
    settings = report.settings
    lines = [
        f"{'detector':<20} {'verdict':<8} {'p-value':>8}  seen",
        *(
            f"{finding.name:<20} {'REFUTED' if finding.refuted else 'ok':<8} "
            f"{finding.p_value:>8.2g}  {finding.detail}"
            for finding in report.findings
        ),
        "",
        f"one step at delta {settings.delta:g}, sample rate {settings.sample_rate:g}: "
        f"epsilon {report.epsilon_claimed:.4g} claimed, at least {report.epsilon_lower_bound:.4g} "
        f"shown ({100 * report.tightness:.0f} %) in {report.bound.trials} trials",
    ]
    if report.gaussian_mu is not None:
        lines.append(
            f"as a Gaussian step (exact norms, every sample): mu at least {report.gaussian_mu:.4g},"
            f" so epsilon at least {report.gaussian_epsilon:.4g} at delta {settings.run_delta:g}"
        )
    if report.run is not None:
        run = report.run
        lines.append(
            f"one run of {run.steps} steps at delta {run.delta:g}: epsilon "
            f"{run.epsilon_claimed:.4g} claimed, at least {run.epsilon_lower_bound:.4g} shown "
            f"({100 * run.tightness:.0f} %) by {run.right} right of {run.guesses} guesses"
        )
    verdict = (
        f"REFUTED by {', '.join(report.refuted)}" if report.refuted else "the claim is not refuted"
    )
    lines.append(f"{verdict}; all statements together hold with confidence {settings.confidence:g}")
    return "\n".join(lines)
