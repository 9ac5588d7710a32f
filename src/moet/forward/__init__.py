"""A model's own layers, as transformers writes them, run one at a time on the weights of a checkpoint."""

from moet.forward.decoder import Decoder
from moet.forward.states import States

__all__ = ["Decoder", "States"]
