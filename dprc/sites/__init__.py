"""Sites: how each kind of module is captured."""

from dprc.sites.base import FactorSite, Receiver, Site, Tapper, retyped, weight_of
from dprc.sites.kinds import make_site
from dprc.sites.loop import LoopSite
from dprc.sites.matrices import EmbeddingSite, LinearSite
from dprc.sites.vectors import ScaleSite

__all__ = [
    "EmbeddingSite",
    "FactorSite",
    "LinearSite",
    "LoopSite",
    "Receiver",
    "ScaleSite",
    "Site",
    "Tapper",
    "make_site",
    "retyped",
    "weight_of",
]
