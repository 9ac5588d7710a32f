"""One layer: statistics, encoding and answers of its experts, a few at a time."""

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from moet.calibrate.encode import RIDGE, Codes
from moet.calibrate.routing import Routing
from moet.calibrate.statistics import PRIOR_TOKENS, Moments, blended
from moet.calibrate.values import Values, inner, native_values, outer
from moet.checkpoint import Checkpoint
from moet.errors import QuantizeError
from moet.models import Activation, MoeLayer

STEP = 4096
"""Tokens at a time in an expert: bounds the memory of what is between its matrices."""
SHARED_TOKENS = 1024
"""Tokens, evenly spaced, that every expert is shown for the shared statistics of its second matrix."""

Encode = Callable[..., Codes]
"""(weight, hessian, wanted, ridge) -> codes: `moet.calibrate.encode.encode_matrix` with a codebook."""


@dataclass(frozen=True)
class Solved:
    """Some experts of a layer at 2 bits: `experts`, the codes of gate and up (rows of gate first), those of down."""

    experts: range
    native: Values
    first: Codes
    second: Codes


@dataclass
class LayerWork:
    """The experts of one layer, in two networks: the full one, and the one whose layers before are at 2 bits.

    full, quantized  what the layer's experts are given in either; the same object as long as the networks are the same
    missing          float32 [tokens, hidden]: what the layer's other parts answer in the full network, less what they answer
                     in the quantized one. The quantized experts are asked to make up for it. None: nothing
    full_answer, quantized_answer   float32 [tokens, hidden], filled by `run`
    output_errors    by expert: |2-bit answer in the quantized network - native answer in the full one| / |the latter|, on
                     the quantized network's tokens, each answer times its router weight; 0 for an expert without tokens
    """

    checkpoint: Checkpoint
    layer: MoeLayer
    activation: Activation
    full: Routing
    quantized: Routing
    missing: torch.Tensor | None = None
    full_answer: torch.Tensor = field(init=False)
    quantized_answer: torch.Tensor = field(init=False)
    output_errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full_answer = torch.zeros_like(self.full.inputs)
        self.quantized_answer = torch.zeros_like(self.quantized.inputs)
        self._paired = self.full is not self.quantized
        self._shares = self.quantized.weight_sums() if self.missing is not None else None

    def counts(self) -> list[int]:
        """Calibration tokens of each expert."""
        return [self.quantized.count(e) for e in range(self.layer.experts)]

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Smallest and median number of tokens of an expert, and how many experts have fewer than the shared statistics
        count for."""
        counts = self.counts()
        return min(counts), int(statistics.median(counts)), sum(n < PRIOR_TOKENS for n in counts)

    def run(
        self, encode: Encode, group: int, pool: ThreadPoolExecutor, encode_down: Encode | None = None
    ) -> Iterator[Solved]:
        """Encodes all experts, `group` at a time, in order. When the iterator ends, both answers are complete.
        encode_down: for the second matrices, where they are not encoded as the first ones. Raises QuantizeError if the
        experts are given what is not finite, or statistics overflow."""
        self._refuse_infinite()
        shared = self._moments()
        for begin in range(0, len(self.quantized.inputs), STEP):
            shared.add(self.quantized.inputs[begin : begin + STEP])
        for experts in groups(self.layer.experts, group):
            native = self._native(experts, pool)
            wanted = self._native_answers(experts, native)
            first = self._solved(encode, experts, "gate and up", native.first, self._first_moments(experts, shared))
            half = Values(first.values, native.second, native.bias, native.out_bias)
            hidden = self._hidden(experts, half)
            moments = self._second_moments(experts, native, half, wanted, hidden)
            second = self._solved(encode_down or encode, experts, "down", native.second, *moments)
            quantized = Values(first.values, second.values, native.bias, native.out_bias)
            self._answer(experts, wanted, hidden, quantized)
            yield Solved(experts, native, first, second)

    def _refuse_infinite(self) -> None:
        for network, routing in (("full", self.full), ("quantized", self.quantized)):
            for what, values in (("inputs", routing.inputs), ("router weights", routing.weights)):
                if not torch.isfinite(values).all():
                    raise QuantizeError(
                        f"layer {self.layer.index}, {what} of its experts in the {network} network: expected finite numbers, "
                        "found others. A dense tensor of this layer or of one before is damaged: compare the checkpoint "
                        "with its source. `--no-calibrate` looks at the experts' weights alone"
                    )

    def _solved(self, encode: Encode, experts: range, what: str, *arguments: torch.Tensor) -> Codes:
        try:
            return encode(*arguments)
        except torch.linalg.LinAlgError:
            raise QuantizeError(
                f"layer {self.layer.index}, experts {experts.start} to {experts.stop - 1}, {what}: expected statistics that "
                "float32 can hold and invert, found others. Weights or inputs there are far too large: compare the "
                "checkpoint with its source. `--no-calibrate` looks at the weights alone"
            ) from None

    def replay(self, group: int, pool: ThreadPoolExecutor, stored: Callable[[range, Values], Values]) -> None:
        """`run` with 2-bit experts that an earlier run has written: stored(experts, native) -> their values."""
        for experts in groups(self.layer.experts, group):
            native = self._native(experts, pool)
            values = stored(experts, native)
            self._answer(
                experts, self._native_answers(experts, native), self._hidden(experts, values), values
            )

    def _native(self, experts: range, pool: ThreadPoolExecutor) -> Values:
        return native_values(self.checkpoint, self.layer.index, experts, self.quantized.inputs.device, pool)

    def _native_answers(self, experts: range, native: Values) -> list["Answers"]:
        """By expert, of all tokens that either network sends it, in the full network."""
        found = []
        for g, e in enumerate(experts):
            tokens = self.full.of_expert(e)
            if self._paired:
                tokens = torch.cat((tokens, self.quantized.of_expert(e))).unique()
            parts = [
                outer(native, g, inner(native, g, self.full.inputs[some], self.activation))
                for some in tokens.split(STEP)
            ]
            found.append(Answers(tokens, torch.cat(parts)))
        return found

    def _hidden(self, experts: range, quantized: Values) -> list[list[torch.Tensor]]:
        """By expert and piece of its tokens: what the quantized network's second matrix is given."""
        return [
            [
                inner(quantized, g, self.quantized.inputs[tokens], self.activation)
                for tokens, _ in self.quantized.pairs(e, STEP)
            ]
            for g, e in enumerate(experts)
        ]

    def _moments(self) -> Moments:
        """Of the first matrix. Its own outputs are what is wanted: the second one, which sees what it really gives, is
        where errors are made up for. Aiming the first one at the full network's as well changed nothing (KL 0.293
        against 0.300 on 135M parameters) and costs as much again."""
        return Moments.zeros(self.quantized.inputs.shape[1], self.quantized.inputs.device)

    def _first_moments(self, experts: range, shared: Moments) -> torch.Tensor:
        found = []
        for e in experts:
            own = self._moments()
            for tokens, weights in self.quantized.pairs(e, STEP):
                own.add(self.quantized.inputs[tokens], weights=weights)
            found.append(blended(own, shared)[0])
        return torch.stack(found)

    def _second_moments(
        self,
        experts: range,
        native: Values,
        half: Values,
        answers: list["Answers"],
        hidden: list[list[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the second matrix: its inputs come out of the 2-bit first one, and its answers are wanted as the native
        expert gives them in the full network, with the expert's share of what is missing there. And the ridge of the
        fit, which grows with the number of unknowns a token."""
        count, columns = len(self.quantized.inputs), self.layer.inter
        sample = torch.arange(0, count, max(1, count // SHARED_TOKENS), device=self.quantized.inputs.device)
        found, ridge = [], []
        for g, e in enumerate(experts):
            own, shared = (
                Moments.zeros(columns, sample.device, self.quantized.inputs.shape[1]) for _ in range(2)
            )
            for (tokens, weights), given in zip(self.quantized.pairs(e, STEP), hidden[g], strict=True):
                wanted = answers[g].of(tokens)
                if native.out_bias is not None:
                    wanted = wanted - native.out_bias[g]
                if self.missing is not None:
                    wanted = wanted + self.missing[tokens] / self._shares[tokens, None]
                own.add(given, wanted, weights)
            given = inner(half, g, self.quantized.inputs[sample], self.activation)
            wanted = inner(native, g, self.full.inputs[sample], self.activation) @ native.second[g].T
            shared.add(given, wanted)
            found.append(blended(own, shared))
            ridge.append(RIDGE + columns / (own.count + PRIOR_TOKENS))
        hessian, wanted = (torch.stack(x) for x in zip(*found, strict=True))
        return hessian, wanted, torch.tensor(ridge, device=hessian.device)

    def _answer(
        self,
        experts: range,
        answers: list["Answers"],
        hidden: list[list[torch.Tensor]],
        quantized: Values,
    ) -> None:
        # An expert has a token once, so no element is written twice and the order of additions is fixed.
        for g, e in enumerate(experts):
            wrong = right = 0.0
            for (tokens, weights), given in zip(self.quantized.pairs(e, STEP), hidden[g], strict=True):
                got = weights[:, None] * outer(quantized, g, given)
                want = weights[:, None] * answers[g].of(tokens)
                self.quantized_answer[tokens] += got
                wrong += float((got - want).square().sum(dtype=torch.float64))
                right += float(want.square().sum(dtype=torch.float64))
            self.output_errors.append((wrong / right) ** 0.5 if right else 0.0)
            for tokens, weights in self.full.pairs(e, STEP):
                self.full_answer[tokens] += weights[:, None] * answers[g].of(tokens)


@dataclass(frozen=True)
class Answers:
    """What one expert answers to some tokens, ascending: float32 [n, hidden], without the router's weights."""

    tokens: torch.Tensor
    values: torch.Tensor

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of tokens that are among them."""
        return self.values[torch.searchsorted(self.tokens, tokens)]


def groups(experts: int, size: int) -> Iterator[range]:
    return (range(begin, min(begin + size, experts)) for begin in range(0, experts, size))


def group_size(hidden: int, inter: int, experts: int, budget: int) -> int:
    """How many experts are encoded together in `budget` bytes. Fixed by the sizes alone: another number is another order
    of roundings. Of each: native, target and 2-bit matrices, codes, and the statistics of the larger input with their
    factor and its inverse."""
    widest = max(hidden, inter)
    one = 4 * (3 * 3 * hidden * inter + 2 * 2 * hidden * inter + 6 * widest * widest)
    return max(1, min(experts, budget // one))
