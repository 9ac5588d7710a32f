"""Models: one small declaration per family; `spec_of` reads a config.json with it."""

from moet.models.family import ModelFamily, Projections
from moet.models.registry import FAMILIES, dense_prefixes, family_of, spec_of
from moet.models.spec import Activation, ModelSpec, MoeLayer

__all__ = [
    "FAMILIES",
    "Activation",
    "ModelFamily",
    "ModelSpec",
    "MoeLayer",
    "Projections",
    "dense_prefixes",
    "family_of",
    "spec_of",
]
