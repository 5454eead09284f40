"""Attacks on the engine: empirical lower bounds on ε, and detectors of what would break it.

A proof covers the mathematics and not the code. An audit runs the code on inputs that are worst for
it and asks how much of the claimed ε can be seen from outside. It can refute a claim; it cannot
prove one (docs/audit.md).
"""

from dprc.audit.bounds import (
    EpsilonBound,
    Event,
    best_lower_bound,
    choose_event,
    epsilon_lower_bound,
    gaussian_mu_lower_bound,
)
from dprc.audit.detectors import Finding
from dprc.audit.one_run import guesses_p_value, one_run_epsilon
from dprc.audit.report import AuditReport, RunBound, audit
from dprc.audit.settings import AuditSettings

__all__ = [
    "AuditReport",
    "AuditSettings",
    "EpsilonBound",
    "Event",
    "Finding",
    "RunBound",
    "audit",
    "best_lower_bound",
    "choose_event",
    "epsilon_lower_bound",
    "gaussian_mu_lower_bound",
    "guesses_p_value",
    "one_run_epsilon",
]
