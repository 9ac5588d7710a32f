"""What goes from layer to layer."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class States:
    """All sequences between two layers.

    ids     int64 [B, T]: the tokens, which some routers and masks look at
    hidden  float [B, T, ...]: what the next layer takes; [B, T, hidden], or [B, T, streams, hidden] where a
            model has several residual streams (DeepSeek V4)
    carry   what else the last layer gave to the next one, each [B, ...]: GLM-5's indices of attended tokens.
            None if the layers of the model return a tensor alone
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    carry: tuple[torch.Tensor | None, ...] | None = None

    @property
    def output(self) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """As the last layer returned it."""
        return self.hidden if self.carry is None else (self.hidden, *self.carry)

    def part(self, sequences: slice) -> "States":
        """Some of the sequences, as views."""
        carry = self.carry and tuple(None if c is None else c[sequences] for c in self.carry)
        return States(self.ids[sequences], self.hidden[sequences], carry)

    def to(self, device: torch.device | str) -> "States":
        carry = self.carry and tuple(None if c is None else c.to(device) for c in self.carry)
        return States(self.ids.to(device), self.hidden.to(device), carry)

    def followed_by(self, output: torch.Tensor | tuple[torch.Tensor | None, ...]) -> "States":
        """The states after a layer that returned `output`."""
        if isinstance(output, torch.Tensor):
            return replace(self, hidden=output, carry=None)
        return replace(self, hidden=output[0], carry=tuple(output[1:]))


def joined(parts: list[States]) -> States:
    """The sequences of all parts, in order."""
    first = parts[0]
    carry = first.carry and tuple(
        None if c is None else torch.cat([p.carry[i] for p in parts]) for i, c in enumerate(first.carry)
    )
    return States(torch.cat([p.ids for p in parts]), torch.cat([p.hidden for p in parts]), carry)
