"""DP-SGD with randomized clipping: private training of language models at long context.

The public names are loaded on first use, so that ``import dprc.accounting`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dprc.errors import PrivacyError

if TYPE_CHECKING:
    from dprc import accounting, estimators, losses
    from dprc.engine import PrivacyEngine

__version__ = "0.1.0"
__all__ = ["PrivacyEngine", "PrivacyError", "__version__", "accounting", "estimators", "losses"]

_SUBMODULES = ("accounting", "estimators", "losses")


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _SUBMODULES:
        return import_module(f"dprc.{name}")
    if name == "PrivacyEngine":
        return import_module("dprc.engine").PrivacyEngine
    raise AttributeError(f"module 'dprc' has no attribute {name!r}")
