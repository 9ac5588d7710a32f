"""Calibrated encoding: 2-bit codes chosen for what a layer answers, not for its weights alone."""

TOKENS = 65536
"""Tokens to calibrate on, if nothing says otherwise."""
