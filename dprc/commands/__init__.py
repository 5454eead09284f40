"""Subcommands of ``dprc``."""
