"""``dprc certify-law``: bound the law of small-head Hutch++ over all spectra."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprc.accounting.certification.search import Progress

_EXAMPLE = """example:
  dprc certify-law --head-rank 2 --num-probes 26 --out small_head_r2_k26.json
"""
_SECONDS_BETWEEN_LINES = 5.0


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``certify-law``."""
    parser = subparsers.add_parser(
        "certify-law",
        help="prove the law of a head rank and probe count, for the accountant's tables",
        description="Bound the put function of small-head Hutch++ over all spectra, by branch and "
        "bound (docs/small_head.md). Takes minutes; progress goes to standard error.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--head-rank", type=int, required=True, metavar="R", help="1 or 2")
    add("--num-probes", type=int, required=True, metavar="K", help="of the tail, at least 4")
    add(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="T",
        help="excess over the best point at which a cell is done (default 0.02)",
    )
    add("--out", metavar="FILE", help="write the table as JSON")
    parser.set_defaults(run=run_certify)


def run_certify(args: argparse.Namespace) -> None:
    """Search, print what was proved, and write it."""
    from pathlib import Path

    from dprc.accounting.certification.search import Effort, certify
    from dprc.accounting.certification.tables import table_of, write_table

    if not 0.0 < args.tolerance < 1.0:
        raise ValueError(f"tolerance must be in (0, 1), got {args.tolerance!r}")
    effort = Effort(tolerance=args.tolerance)
    start = last = time.monotonic()

    def report(progress: "Progress") -> None:
        nonlocal last
        if time.monotonic() - last < _SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        print(
            f"{last - start:5.0f} s  {progress.cells} cells, {progress.open_cells} open, "
            f"largest gap to the best point {100 * progress.gap:.1f} %",
            file=sys.stderr,
        )

    certificate = certify(args.head_rank, args.num_probes, effort, report)
    table = table_of(args.head_rank, args.num_probes, effort, certificate)
    print(
        f"certified head_rank={args.head_rank}, num_probes={args.num_probes} on "
        f"{certificate.cells} cells in {time.monotonic() - start:.0f} s\n"
        f"gap to the best point {100 * table['gap']:.2f} % at strikes from 0.8 to 1.3\n"
        f"matched probes {table['matched_probes']}"
    )
    if args.out is not None:
        write_table(Path(args.out), table)
