"""Sites whose weight is a matrix: linear layers, embeddings, convolutions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dprc.contributions import Contribution, MatrixUse
from dprc.errors import PrivacyError
from dprc.estimators import Use
from dprc.sites.base import FactorSite, Tapper, detached, sole_argument, weight_of


class LinearSite(FactorSite):
    """``nn.Linear``: the weight is (out, in)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return GᵀA."""
        return MatrixUse(Use(self.by_token(grads), self.by_token(saved)))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute x·weightᵀ + bias."""
        x = sole_argument(args, kwargs)
        return capture.tap(F.linear(x, weight_of(module), detached(module, "bias")), x, self)


class TransposedLinearSite(FactorSite):
    """``Conv1D`` of transformers: a linear layer whose weight is (in, out)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return AᵀG."""
        return MatrixUse(Use(self.by_token(saved), self.by_token(grads)))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute bias + x·weight."""
        x = sole_argument(args, kwargs)
        bias, weight = module._parameters["bias"].detach(), weight_of(module)
        flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
        return capture.tap(flat.view(*x.shape[:-1], flat.shape[-1]), x, self)


@dataclass(frozen=True)
class EmbeddingSite(FactorSite):
    """``nn.Embedding`` and its subclasses; rows at ``padding_idx`` have no gradient."""

    padding_idx: int | None = None

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return one-hot(ids)ᵀG."""
        if self.padding_idx is not None:
            grads = grads.masked_fill((saved == self.padding_idx).unsqueeze(-1), 0)
        return MatrixUse(Use(saved.reshape(saved.shape[0], -1), self.by_token(grads)))

    def look_up(self, ids: torch.Tensor, weight: torch.Tensor, capture: Tapper) -> torch.Tensor:
        """Pick the rows, tapped; ids made once for the whole batch get a row for each sample."""
        if capture.batch is not None and capture.batch > 1 and ids.dim() > 1 and len(ids) == 1:
            ids = ids.expand(capture.batch, *ids.shape[1:])
        return capture.tap(F.embedding(ids, weight.detach(), self.padding_idx), ids, self)

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Run the module's own forward (a subclass may scale or shift) and tap the look-up."""
        with _LookUpMode(module.weight, self, capture):
            output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output


class _LookUpMode(TorchFunctionMode):
    """Within one embedding's forward, taps the call of ``F.embedding`` on its weight."""

    def __init__(self, weight: torch.Tensor, site: EmbeddingSite, capture: Tapper) -> None:
        super().__init__()
        self._weight, self._site, self._capture = weight, site, capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) > 1 and args[1] is self._weight:
            return self._site.look_up(args[0], self._weight, self._capture)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ConvolutionSite(FactorSite):
    """``nn.Conv1d`` and ``nn.Conv2d``: a linear layer over patches."""

    convolution: Any = None

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:  # (B, n, …) -> (B, T, n)
        """Put the channels last and merge the places."""
        return tensor.flatten(2).transpose(1, 2)

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return Gᵀ·patches."""
        layer = self.convolution
        line = saved.dim() == 3  # Conv1d is a Conv2d of height 1
        options = {
            name: (1, *getattr(layer, name)) if line else getattr(layer, name)
            for name in ("kernel_size", "dilation", "stride")
        }
        padding = layer.padding if not line else (0, *layer.padding)
        image = saved.unsqueeze(2) if line else saved
        patches = F.unfold(image, padding=padding, **options).transpose(1, 2)
        return MatrixUse(Use(self.by_token(grads), patches))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Convolve."""
        x = sole_argument(args, kwargs)
        if x.dim() != module._parameters["weight"].dim():
            raise PrivacyError(f"{self.path}: needs a batch axis, got an input of {x.dim()} axes")
        output = module._conv_forward(x, weight_of(module), detached(module, "bias"))
        return capture.tap(output, x, self)
