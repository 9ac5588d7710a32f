"""Claims every tensor name: to one part of one routed expert, or to the rest of the model. What nothing
claims is an error."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from moet.errors import CheckpointError
from moet.models import ModelFamily, ModelSpec, MoeLayer

Role = Literal["codes", "scale", "multiplier", "divisor", "input", "bias"]
"""What a tensor is to its matrix. multiplier and divisor: NVFP4's second scale (modelopt's multiplies,
compressed-tensors' divides);
input: a scale for activations, which is claimed and not used."""

SUFFIXES: dict[str, Role] = {
    "weight": "codes",
    "weight_packed": "codes",
    "scale": "scale",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "weight_scale_2": "multiplier",
    "weight_global_scale": "divisor",
    "input_scale": "input",
    "input_global_scale": "input",
    "bias": "bias",
}
"""Last part of `experts.{expert}.{projection}.{suffix}`."""

FUSED_SUFFIXES: dict[str, Role] = (
    {
        "": "codes",
        "_blocks": "codes",
        "_scales": "scale",
        "_scale_inv": "scale",
        "_weight_scale": "scale",
        "_weight_scale_2": "multiplier",
        "_input_scale": "input",
        "_bias": "bias",
    }
    | {f".{suffix}": role for suffix, role in SUFFIXES.items()}
    | {f"_{suffix}": role for suffix, role in SUFFIXES.items()}
)
"""What follows `experts.{projection}` where one tensor holds all experts."""

Matrix3 = Literal["gate", "up", "down", "gate_up"]


@dataclass
class LayerNames:
    """Names of one layer's expert tensors. matrices: {projection's name: matrix}.
    parts: {(expert, matrix): {role: name}}; expert is -1 where one tensor holds all experts."""

    layer: MoeLayer
    matrices: dict[str, Matrix3]
    parts: dict[tuple[int, Matrix3], dict[Role, str]] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        return (-1, "down") in self.parts

    def counterpart(self, name: str, expert: int, matrix: Matrix3) -> str:
        """What the part that is called `name` in one matrix is called in another."""
        rest = name.removeprefix(self.layer.prefix)
        old = next(p for p in sorted(self.matrices, key=len, reverse=True) if p in rest)
        new = next(p for p, m in self.matrices.items() if m == matrix)
        number = "" if expert < 0 else f"{expert}."
        return f"{self.layer.prefix}{number}{new}{rest.partition(old)[2]}"

    def names(self) -> Iterable[str]:
        return (name for roles in self.parts.values() for name in roles.values())


class Namer:
    """Knows the names of one model. `layers` fills as names are claimed."""

    def __init__(self, family: ModelFamily, spec: ModelSpec, dense: tuple[str, ...]) -> None:
        p = family.projections
        self._dense = dense
        self._matrix: dict[str, Matrix3] = {p.gate: "gate", p.up: "up", p.down: "down"} | (
            {p.fused: "gate_up"} if p.fused else {}
        )
        self.layers = {layer.prefix: LayerNames(layer, self._matrix) for layer in spec.layers}
        patterns = [pattern for pattern in (*family.experts, family.mtp_experts) if pattern]
        prefix = "|".join(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(pattern)) for pattern in patterns)
        self._experts = re.compile(f"({prefix})(.*)", re.DOTALL)
        projections = "|".join(map(re.escape, self._matrix))
        self._single = re.compile(rf"(0|[1-9]\d*)\.({projections})\.(\w+)")
        self._fused = re.compile(rf"({projections})(|[._]\w+)")

    def claim(self, name: str, shard: str) -> bool:
        """True: part of a routed expert; False: of the rest. Raises CheckpointError for a name that is
        neither, or the second for one part."""
        match = self._experts.fullmatch(name)
        if not match:
            if name.startswith(self._dense):
                return False
            raise _unclaimed(name, shard, f"a name that starts with one of {self._known()}")
        layer = self.layers.get(match[1])
        if layer is None:
            raise _unclaimed(name, shard, "routed experts only in layers that config.json gives some")
        expert, matrix, role = self._part(match[2], name, shard, layer.layer)
        roles = layer.parts.setdefault((expert, matrix), {})
        if role in roles:
            raise _unclaimed(name, shard, f"one tensor for the {role} of this matrix (it is {roles[role]})")
        roles[role] = name
        return True

    def _part(self, rest: str, name: str, shard: str, layer: MoeLayer) -> tuple[int, Matrix3, Role]:
        if single := self._single.fullmatch(rest):
            expert, matrix = int(single[1]), self._matrix[single[2]]
            if expert >= layer.experts:
                raise _unclaimed(name, shard, f"experts 0 to {layer.experts - 1}, as config.json says")
            if matrix != "gate_up" and single[3] in SUFFIXES:
                return expert, matrix, SUFFIXES[single[3]]
        elif fused := self._fused.fullmatch(rest):
            matrix = self._matrix[fused[1]]
            if matrix in ("gate_up", "down") and fused[2] in FUSED_SUFFIXES:
                return -1, matrix, FUSED_SUFFIXES[fused[2]]
        raise _unclaimed(
            name,
            shard,
            f"after {layer.prefix}: EXPERT.PROJECTION.SUFFIX with a projection of {', '.join(self._matrix)} "
            f"and a suffix of {', '.join(SUFFIXES)}; or PROJECTION, all experts in one, "
            f"alone or with {', '.join(s for s in FUSED_SUFFIXES if s)}",
        )

    def _known(self) -> str:
        shown = [p for p in self._dense if not any(c.isdigit() for c in p)]
        return ", ".join(shown + sorted({re.sub(r"\d+", "N", p) for p in self._dense if p not in shown}))


def _unclaimed(name: str, shard: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{shard}, tensor {name}: expected {expected}. Found a name that nothing claims; "
        "no tensor is dropped silently."
    )


def check_complete(names: LayerNames) -> None:
    """Every expert of the layer has the same parts. Raises CheckpointError naming the tensor that is missing
    or too many."""
    layer = names.layer
    if names.fused or any(expert == -1 for expert, _ in names.parts):
        wanted: list[tuple[int, Matrix3]] = [(-1, "gate_up"), (-1, "down")]
    else:
        wanted = [(expert, matrix) for expert in range(layer.experts) for matrix in ("gate", "up", "down")]
    extra = sorted(set(names.parts) - set(wanted))
    if extra:
        name = next(iter(names.parts[extra[0]].values()))
        raise CheckpointError(
            f"tensor {name}: expected the experts of a layer either one by one or fused, "
            f"found both in layer {layer.index}"
        )
    common = Counter(frozenset(names.parts.get(key, ())) for key in wanted).most_common(1)[0][0]
    if "codes" not in common:
        raise CheckpointError(
            f"layer {layer.index}, {layer.prefix}: expected {layer.experts} experts with weights, found "
            f"{len({e for e, _ in names.parts})} with {sorted(common) or 'no tensors'}"
        )
    example = names.parts[next(key for key in wanted if frozenset(names.parts.get(key, ())) == common)]
    for expert, matrix in wanted:
        roles = frozenset(names.parts.get((expert, matrix), ()))
        if roles != common:
            where = f"layer {layer.index}, {'all experts' if expert < 0 else f'expert {expert}'}, {matrix}"
            missing = sorted(common - roles)
            if missing:
                like = example[missing[0]]
                raise CheckpointError(
                    f"{where}: expected tensor {names.counterpart(like, expert, matrix)} for its "
                    f"{missing[0]} (there is {like}), found none. "
                    "The checkpoint is incomplete: download it again."
                )
            surplus = names.parts[expert, matrix][sorted(roles - common)[0]]
            raise CheckpointError(
                f"{where}, tensor {surplus}: expected only {', '.join(sorted(common))}, "
                f"as the layer's other experts have, found a {sorted(roles - common)[0]} too"
            )
