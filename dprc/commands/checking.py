"""``dprc check``."""

import argparse
import json
from pathlib import Path
from typing import Any

from dprc.commands.options import stay_offline

# A norm wrong by more is no rounding of float32 layers inside a float64 model.
TOLERANCE = 1e-4


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    check = subparsers.add_parser(
        "check",
        help="compare each parameter's per-sample norm with brute force",
        description=(
            "Compare each trained parameter's per-sample gradient norm with brute force, on your "
            "own causal language model. Exit code 1 if any differs."
        ),
        epilog="example: dprc check --model smollm2-135m",
    )
    check.add_argument("--model", required=True, help="smollm2-135m, or a Hugging Face folder")
    check.add_argument(
        "--batch", type=Path, help="JSON with input_ids (and attention_mask, labels), equal lengths"
    )
    check.add_argument("--chunk-tokens", type=int, default=1024, help="of the chunked loss")
    check.add_argument("--estimator", default="hutchinson", help="that training would use")
    check.add_argument("--num-probes", type=int, default=32, help="of it (default: 32)")
    check.add_argument("--head-rank", type=int, metavar="R", help="hutchpp only")
    check.add_argument("--json", action="store_true", help="print the rows as JSON")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    stay_offline()
    import torch

    from dprc import estimators
    from dprc.checking import check_model, random_batch
    from dprc.losses import causal_lm_loss
    from dprc.models import load_causal_lm

    estimator = estimators.get(
        arguments.estimator, num_probes=arguments.num_probes, head_rank=arguments.head_rank
    )
    model = load_causal_lm(arguments.model, torch.float64).eval()
    vocabulary = int(model.config.vocab_size)
    batch = _read_batch(arguments.batch) if arguments.batch else random_batch(vocabulary)
    largest = int(batch["input_ids"].max())
    if not 0 <= largest < vocabulary:
        raise ValueError(
            f"--batch: the model knows ids below {vocabulary}, got {largest} in input_ids"
        )
    rows = check_model(
        model,
        batch,
        lambda m, b: causal_lm_loss(m, b, chunk_tokens=arguments.chunk_tokens),
        estimator,
    )
    worst = max(row["max_relative_error"] for row in rows)
    if arguments.json:
        print(json.dumps({"parameters": rows, "max_relative_error": worst}, indent=2))
    else:
        width = max(len(row["name"]) for row in rows)
        print("Exact norms against brute force. 'estimator' (and its probes) is for training.")
        print(f"{'parameter':<{width}}  {'captured as':<18} {'estimator':<14} relative error")
        for row in rows:
            used = " ".join(str(row[key]) for key in ("estimator", "num_probes") if row[key])
            print(
                f"{row['name']:<{width}}  {row['captured_as']:<18} {used:<14} "
                f"{row['max_relative_error']:.1e}"
            )
        print(f"largest relative error {worst:.1e}: {'ok' if worst <= TOLERANCE else 'WRONG'}")
    return 0 if worst <= TOLERANCE else 1


def _read_batch(path: Path) -> dict[str, Any]:
    import torch

    raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or "input_ids" not in raw:
        raise ValueError(f"--batch: {path} must hold an object with 'input_ids'")
    batch = {name: torch.tensor(value) for name, value in raw.items()}
    ids = batch["input_ids"]
    batch.setdefault("attention_mask", torch.ones_like(ids))
    batch.setdefault("labels", ids.masked_fill(batch["attention_mask"] == 0, -100))
    return batch
