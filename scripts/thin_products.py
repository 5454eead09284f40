"""Times of the products of a tall factor with a few columns, in every order, on this machine.

Shows why ``dprc/estimators/products.py`` takes the orders it takes:

    python scripts/thin_products.py
    python scripts/thin_products.py --device cuda --widths 2048,8192
"""

import argparse
import sys
from collections.abc import Callable

import torch

from dprc.profiling.latency import time_interleaved

ORDERS = ("F·P", "Pᵀ·Fᵀ", "Fᵀ·Y", "Yᵀ·F")


def orders(
    batch: int, tokens: int, width: int, columns: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the four products of one shape, by name."""
    factor = torch.randn(batch, tokens, width, device=device)
    narrow = torch.randn(batch, width, columns, device=device)
    thin = torch.randn(batch, tokens, columns, device=device)
    narrow_rows, thin_rows = narrow.mT.contiguous(), thin.mT.contiguous()
    products = (
        lambda: factor @ narrow,
        lambda: narrow_rows @ factor.mT,
        lambda: factor.mT @ thin,
        lambda: thin_rows @ factor,
    )
    return dict(zip(ORDERS, products, strict=True))


def main(words: list[str] | None = None) -> None:
    """Print a row of medians for each width and number of columns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--batch", type=int, default=2, help="samples (default: 2)")
    add("--tokens", type=int, default=2048, help="of each (default: 2048)")
    add("--widths", default="512,2048,8192", help="of F (default: 512,2048,8192)")
    add("--columns", default="1,2,3,4,8,16,28,32", help="of P and Y (default: 1 to 32)")
    add("--repeats", type=int, default=15, help="interleaved rounds (default: 15)")
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    _say(f"milliseconds; F is {arguments.batch} x {arguments.tokens} x width")
    _say(f"{'width':>7}{'columns':>9}" + "".join(f"{name:>10}" for name in ORDERS))
    for width in map(int, arguments.widths.split(",")):
        for columns in map(int, arguments.columns.split(",")):
            work = orders(arguments.batch, arguments.tokens, width, columns, device)
            timings = time_interleaved(work, device, repeats=arguments.repeats)
            cells = "".join(f"{1000 * timings[name].median_seconds:>10.2f}" for name in ORDERS)
            _say(f"{width:>7}{columns:>9}{cells}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
