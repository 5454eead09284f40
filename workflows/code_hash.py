"""Hashes of the modules a rule uses: an edit reruns the rules it can change, and no others."""

from dprc.provenance import code_hash, result_hash

__all__ = ["code_hash", "result_hash"]
