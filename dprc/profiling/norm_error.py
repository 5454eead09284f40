"""How far estimated norms are from exact ones, on gradients of a language model on real text."""

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dprc import estimators
from dprc.losses import causal_lm_loss

RANDOMIZED = ("hutchinson", "hutchpp")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
ALL_LAYERS = "all layers together"
# Copies of a layer's factors that are estimated at once; each draws its own sketch.
_COPIES = 8


@dataclass(frozen=True)
class LayerGradient:
    """The factors of one document's gradient of one linear layer's weight.

    Attributes:
        layer: The module's name.
        document: Index of the document.
        activations: (T, in_features).
        output_grads: (T, out_features); the gradient is output_gradsᵀ activations.
    """

    layer: str
    document: int
    activations: torch.Tensor
    output_grads: torch.Tensor

    @property
    def narrow_side(self) -> int:
        """The smaller of in_features and out_features."""
        return min(self.activations.shape[-1], self.output_grads.shape[-1])

    def energies(self) -> torch.Tensor:
        """Return the squared singular values of the gradient, float64; they sum to its norm."""
        gradient = self.output_grads.double().t() @ self.activations.double()
        values: torch.Tensor = torch.linalg.svdvals(gradient)
        return values.square()


def middle_block(model: Any) -> str:
    """Return the pattern of the linear layers of a decoder's middle block.

    Raises:
        ValueError: The model's configuration does not say how many blocks it has.
    """
    blocks = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not blocks:
        raise ValueError(
            "layers: the model does not say how many blocks it has; name the layers, for instance "
            "'*.layers.3.*'"
        )
    return f"*.layers.{blocks // 2}.*"


def choose_layers(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the ``nn.Linear`` modules, but the head, that match a shell pattern.

    Raises:
        ValueError: None does; the message gives some that exist.
    """
    # The loss makes logits in chunks, which are several uses of the head.
    causal: Any = model
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    chosen = fnmatch.filter(linear, pattern)
    if not chosen:
        known = ", ".join(linear[:3])
        raise ValueError(f"layers: no linear layer is called {pattern!r}; there are {known}, …")
    return chosen


def layer_gradients(
    model: nn.Module, documents: Sequence[torch.Tensor], layers: Sequence[str]
) -> Iterator[LayerGradient]:
    """Yield the factors of each layer's gradient for each document's language-model loss.

    Args:
        model: A Hugging Face causal language model.
        documents: Token ids, (T,) each.
        layers: Names of its ``nn.Linear`` modules, each used once.
    """
    model.eval()
    for index, ids in enumerate(documents):
        seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        handles = [
            model.get_submodule(name).register_forward_hook(_keeper(seen, name)) for name in layers
        ]
        try:
            batch = {"input_ids": ids.unsqueeze(0), "labels": ids.unsqueeze(0)}
            loss = causal_lm_loss(model, batch).sum()
        finally:
            for handle in handles:
                handle.remove()
        # Only what leads to these outputs is computed: no gradient of any weight.
        grads = torch.autograd.grad(loss, [seen[name][1] for name in layers])
        for name, grad in zip(layers, grads, strict=True):
            yield LayerGradient(name, index, seen[name][0][0].detach(), grad[0])


def _keeper(
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]], name: str
) -> Callable[[Any, Any, torch.Tensor], None]:
    def keep(_: Any, arguments: Any, output: torch.Tensor) -> None:
        # The last call stays: a loss may try the model on two tokens before.
        seen[name] = (arguments[0], output)

    return keep


def estimated_squared_norms(
    gradient: LayerGradient,
    estimator: estimators.Estimator,
    repeats: int,
    generator: torch.Generator,
) -> torch.Tensor:  # (repeats,) float64
    """Estimate one squared norm again and again, each time with a sketch of its own.

    The copies go through the estimator as the samples of a batch do, so its sketch must be
    ``"per_sample"``. A shared sketch gives a single sample's estimate the same law.
    """
    parts = []
    for start in range(0, repeats, _COPIES):
        copies = min(_COPIES, repeats - start)
        factors = [
            factor.expand(copies, *factor.shape)
            for factor in (gradient.activations, gradient.output_grads)
        ]
        parts.append(estimator.squared_norm(factors[0], factors[1], generator))
    return torch.cat(parts).cpu().double()


def measure_norm_error(
    gradients: Sequence[LayerGradient],
    num_probes: Sequence[int],
    *,
    repeats: int,
    seed: int = 0,
    progress_fn: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Compare estimated norms with exact ones.

    Args:
        gradients: Of any layers and documents.
        num_probes: Probe counts k; ``hutchpp`` has a head of rank k, as the paper's.
        repeats: Independent estimates of each norm.
        seed: Of the sketches.
        progress_fn: Told what is about to be measured.

    Returns:
        A row for each layer, document, estimator and k, and for each document the layers together
        (the norm of all their gradients, as clipping takes it). ``norm_error_*`` is of estimate /
        exact - 1, ``squared_error_*`` of the same for squared norms: mean, standard deviation and
        quantiles over the repeats. ``squared_error_std_expected`` is what theory gives Hutchinson
        for this gradient's singular values, ``squared_error_std_bound`` = √(2/k) what it gives any
        gradient. A layer whose smaller side is at most k has no row: training takes its norm
        exactly, as the layers together do here. The row of ``tiled`` shows the rounding of an exact
        norm.

    Raises:
        ValueError: No gradient, a probe count below 1, or fewer than two repeats.
    """
    if not gradients:
        raise ValueError("gradients: must be at least one, got none")
    if repeats < 2:
        raise ValueError(f"repeats: a deviation needs at least 2, got {repeats}")
    generator = torch.Generator().manual_seed(seed)
    exact = [gradient.energies() for gradient in gradients]
    rows = []
    for gradient, energies in zip(gradients, exact, strict=True):
        truth = float(energies.sum())
        tiled = estimators.get("tiled").squared_norm(
            gradient.activations.unsqueeze(0), gradient.output_grads.unsqueeze(0)
        )
        rows.append(_row(gradient, "tiled", None, tiled.cpu().double(), truth))
    for name in RANDOMIZED:
        for count in num_probes:
            progress_fn(f"{name}, {count} probes")
            estimator = estimators.get(name, num_probes=count)
            together: dict[int, tuple[torch.Tensor, float]] = {}
            for gradient, energies in zip(gradients, exact, strict=True):
                truth = float(energies.sum())
                if gradient.narrow_side <= count:
                    estimates = torch.full((repeats,), truth, dtype=torch.float64)
                else:
                    estimates = estimated_squared_norms(gradient, estimator, repeats, generator)
                    row = _row(gradient, name, count, estimates, truth)
                    if name == "hutchinson":
                        shares = energies / truth
                        spread = math.sqrt(2 / count * float(shares.square().sum()))
                        row["squared_error_std_expected"] = spread
                    rows.append(row)
                sums, total = together.get(gradient.document, (torch.zeros(repeats), 0.0))
                together[gradient.document] = (sums + estimates, total + truth)
            for document, (sums, total) in together.items():
                rows.append(
                    {
                        **_statistics(sums, total, count),
                        "layer": ALL_LAYERS,
                        "document": document,
                        "estimator": name,
                        "num_probes": count,
                    }
                )
    return rows


def _row(
    gradient: LayerGradient,
    name: str,
    num_probes: int | None,
    estimates: torch.Tensor,
    truth: float,
) -> dict[str, Any]:
    return {
        "layer": gradient.layer,
        "document": gradient.document,
        "in_features": gradient.activations.shape[-1],
        "out_features": gradient.output_grads.shape[-1],
        "tokens": gradient.activations.shape[0],
        "estimator": name,
        "num_probes": num_probes,
        **_statistics(estimates, truth, num_probes),
    }


def _statistics(estimates: torch.Tensor, truth: float, num_probes: int | None) -> dict[str, Any]:
    """Summarise relative errors of norms and of squared norms."""
    squared = estimates / truth - 1
    found: dict[str, Any] = {"repeats": estimates.numel(), "exact_norm": math.sqrt(truth)}
    for name, errors in (("norm", (estimates / truth).sqrt() - 1), ("squared", squared)):
        levels = torch.tensor(QUANTILES, dtype=errors.dtype)
        found[f"{name}_error_mean"] = float(errors.mean())
        # One estimate of a norm without randomness has no spread.
        found[f"{name}_error_std"] = float(errors.std()) if errors.numel() > 1 else 0.0
        found[f"{name}_error_quantiles"] = {
            str(level): float(value)
            for level, value in zip(QUANTILES, errors.quantile(levels), strict=True)
        }
    bound = None if num_probes is None else math.sqrt(2 / num_probes)
    return {**found, "squared_error_std_bound": bound}


def first_long_documents(
    texts: Sequence[str], tokenizer: Any, *, tokens: int, count: int
) -> list[torch.Tensor]:
    """Return the first documents that have enough tokens, cut to that many.

    Raises:
        ValueError: There are too few.
    """
    found: list[torch.Tensor] = []
    for text in texts:
        if len(found) == count:
            break
        ids = tokenizer(text, truncation=True, max_length=tokens)["input_ids"]
        if len(ids) == tokens:
            found.append(torch.tensor(ids))
    if len(found) < count:
        raise ValueError(
            f"tokens: {count} documents of at least {tokens} tokens are needed, the data has "
            f"{len(found)}. Use fewer tokens or fewer documents"
        )
    return found
