"""moet: Mixture-of-Experts models that do not fit, served by an unmodified vLLM."""

__version__ = "0.1.0"
