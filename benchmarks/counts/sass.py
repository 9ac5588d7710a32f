"""SASS as `cuobjdump -sass` prints it: instructions, the blocks that they form, and the loops that multiply."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"^-?\|?R(\d+)\b")
_TARGET = re.compile(r"(?:^|[ ,`(])(0x[0-9a-f]+)\)?$")

MMA = re.compile(r"^(?:HMMA|IMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA)\.")
_SHAPE = re.compile(r"\.(\d+x\d+x\d+|16816|1688|16832|16864)\b")
ROWS_OF_A_WARP = 16
"""Of the product's rows (here: weights) that one warp's instruction has, in mma.sync, and in wgmma, where four warps have 64."""


@dataclass(frozen=True)
class Instruction:
    """At byte `address` of its function; `opcode` with its suffixes."""

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes, or BSSY's threads meet."""
        found = _TARGET.search(", ".join(self.operands)) if self.name in ("BRA", "JMP", "BSSY", "CALL", "WARPSYNC") else None
        return int(found[1], 16) if found else None

    @property
    def conditional(self) -> bool:
        return bool(self.predicate) or len(self.operands) > 1   # BRA.U UP0, 0x..; BRA P0, 0x..; BRA.DIV UR4, 0x..

    @property
    def is_mma(self) -> bool:
        return MMA.match(self.opcode) is not None

    @property
    def fragment_weights(self) -> int:
        """Values of the A operand that a warp's MMA takes: 16 rows by the K of its shape."""
        found = _SHAPE.search(self.opcode)
        if found is None:
            raise ValueError(f"{self.opcode}: expected an MMA whose shape is known")
        shape = found[1]
        return ROWS_OF_A_WARP * int(shape.split("x")[2] if "x" in shape else shape[len("16") + 1 :] if shape.startswith("168") else shape[-1])

    @property
    def columns(self) -> int:
        """N of an MMA."""
        found = _SHAPE.search(self.opcode)
        return int(found[1].split("x")[1]) if found and "x" in found[1] else 8

    @property
    def register_a(self) -> str:
        """The A operand: the first register after the result."""
        return self.operands[1].split(".")[0]

    def written(self) -> range:
        """Numbers of the registers that it writes, as far as loops of MMAs need them: an empty range for none."""
        for operand in self.operands[:2]:
            found = _REGISTER.match(operand)
            if found:
                return range(int(found[1]), int(found[1]) + self._width())
            if not re.match(r"^U?P[\dT]", operand):
                break
        return range(0)

    def _width(self) -> int:
        if self.is_mma:
            return 4
        if self.name in ("LDG", "LDS", "LD", "LDC", "LDL", "LDCU"):
            return next((int(b) // 32 for b in self.opcode.split(".") if b in ("64", "128", "256")), 1)
        if self.name == "LDSM":
            return int(self.opcode.rsplit(".", 1)[1]) if self.opcode.rsplit(".", 1)[1] in ("2", "4") else 1
        return 2 if "WIDE" in self.opcode or (self.name == "CS2R" and "32" not in self.opcode) else 1


def functions(text: str) -> dict[str, list[Instruction]]:
    """Kernel -> its instructions, in their order."""
    found: dict[str, list[Instruction]] = {}
    here: list[Instruction] = []
    for line in text.splitlines():
        if name := _FUNCTION.match(line):
            here = found.setdefault(name[1], [])
        elif match := _LINE.match(line):
            operands = tuple(o.strip() for o in match[4].split(",")) if match[4] else ()
            here.append(Instruction(int(match[1], 16), match[2] or "", match[3], operands))
    return found


def written_before_a_wait(instructions: list[Instruction]) -> list[tuple[Instruction, Instruction]]:
    """(a wgmma whose A operand is in registers, an instruction that writes one of them on some way from there to the next wait for all products)."""
    blocks, follows = _blocks(instructions)
    found = []
    for b, block in enumerate(blocks):
        for n, product in enumerate(block):
            if product.name != "HGMMA" or not _REGISTER.match(product.register_a):
                continue
            first = int(product.register_a[1:])
            seen, ways = set(), [(b, block[n + 1 :])]
            while ways:
                at, rest = ways.pop()
                for i in rest:
                    if i.opcode.startswith("WARPGROUP.DEPBAR") and i.operands[-1] == "0x0":
                        break
                    if not i.is_mma and not i.name.startswith(("ST", "RED", "SYNCS")) and set(i.written()) & set(range(first, first + 4)):
                        found.append((product, i))
                else:
                    ways += [(f, blocks[f]) for f in follows[at] if f not in seen]
                    seen.update(follows[at])
    return found


@dataclass(frozen=True)
class Loop:
    """Innermost of those that multiply. body: the shortest way through a turn of those with the most products; so what a turn may leave out is not in it, and a loop inside it that
    does not multiply (waiting for a copy) is once. longest: instructions of the longest way."""

    address: int
    body: tuple[Instruction, ...]
    longest: int

    @property
    def mmas(self) -> tuple[Instruction, ...]:
        return tuple(i for i in self.body if i.is_mma)

    def fragments(self) -> Iterator[Instruction]:
        """One MMA for each A fragment: the MMAs that share one (tiles of tokens, planes of activations) read the same registers with nothing written there between."""
        fresh: dict[str, bool] = {}
        for i in self.body:
            if i.is_mma:
                if fresh.get(i.register_a, True):
                    yield i
                fresh[i.register_a] = False
            for number in i.written():
                for a in range(number - 3, number + 1):
                    fresh[f"R{a}"] = True

    @property
    def weights(self) -> int:
        """That a warp multiplies in one turn, however many tokens with."""
        return sum(i.fragment_weights for i in self.fragments())

    @property
    def sharing(self) -> float:
        """MMAs of a fragment."""
        return len(self.mmas) / max(1, sum(1 for _ in self.fragments()))


def loops(instructions: list[Instruction]) -> list[Loop]:
    """Natural loops that hold MMAs and no smaller loop that does, by address."""
    blocks, follows = _blocks(instructions)
    above = _dominators(follows)
    bodies: dict[int, set[int]] = {}
    before: list[list[int]] = [[] for _ in blocks]
    for b, nexts in enumerate(follows):
        for n in nexts:
            before[n].append(b)
    for b, nexts in enumerate(follows):
        for head in nexts:
            if above[b] is not None and _dominates(above, head, b):
                body, open = bodies.setdefault(head, {head}), [b]
                while open:
                    at = open.pop()
                    if at not in body:
                        body.add(at)
                        open += [p for p in before[at] if above[p] is not None]
    multiply = {h: body for h, body in bodies.items() if any(i.is_mma for b in body for i in blocks[b])}
    inner = [h for h, body in multiply.items() if not any(other < body for other in multiply.values())]
    found = []
    for head in sorted(inner):
        body = multiply[head]
        ahead = {b: [n for n in follows[b] if n in body and not _dominates(above, n, b)] for b in body}
        ends = [b for b in body if head in follows[b]]
        work = {b: sum(i.fragment_weights * i.columns for i in blocks[b] if i.is_mma) for b in body}
        _, way = _best(head, ahead, ends, {b: (work[b], -len(blocks[b])) for b in body})
        longest, _ = _best(head, ahead, ends, {b: (len(blocks[b]), 0) for b in body})
        found.append(Loop(blocks[head][0].address, tuple(i for b in way for i in blocks[b]), longest[0]))
    return found


def _postorder(start: int, follows: Mapping[int, list[int]] | Sequence[list[int]]) -> list[int]:
    """The blocks that `start` reaches, each after those that it leads to (loops' way back apart)."""
    order: list[int] = []
    seen, stack = {start}, [(start, iter(follows[start]))]
    while stack:
        block, nexts = stack[-1]
        following = next((n for n in nexts if n not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(follows[following])))
    return order


def _best(head: int, follows: dict[int, list[int]], ends: list[int], gain: dict[int, tuple[int, int]]) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The way from `head` to one of `ends` whose gains add up to the most, and their sum."""
    ways = {head: (gain[head], (head,))}
    for block in reversed(_postorder(head, follows)):
        sums, way = ways[block]
        for n in follows[block]:
            total = (sums[0] + gain[n][0], sums[1] + gain[n][1])
            if n not in ways or total > ways[n][0]:
                ways[n] = (total, (*way, n))
    return max(ways[b] for b in ends)


def _blocks(instructions: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks by address, and the blocks that may run after each."""
    starts = {instructions[0].address} | {i.target for i in instructions if i.target is not None}
    ends = ("BRA", "JMP", "EXIT", "RET", "BSYNC", "BRX", "CALL", "BREAK")
    starts |= {after.address for i, after in itertools.pairwise(instructions) if i.name in ends}
    blocks: list[list[Instruction]] = []
    for i in instructions:
        if i.address in starts:
            blocks.append([])
        blocks[-1].append(i)
    at = {block[0].address: n for n, block in enumerate(blocks)}
    meetings: dict[str, list[int]] = {}
    for i in instructions:
        if i.name == "BSSY" and i.target in at:
            meetings.setdefault(i.operands[0], []).append(at[i.target])
    follows = []
    for n, block in enumerate(blocks):
        last, through = block[-1], [n + 1] if n + 1 < len(blocks) else []
        aim = [at[last.target]] if last.target in at else []
        if last.name in ("BRA", "JMP"):
            follows.append(aim + (through if last.conditional else []))
        elif last.name == "CALL":   # of a subroutine, which ends with RET and leads nowhere from here; or a jump out of a loop
            follows.append(aim + through)
        elif last.name in ("EXIT", "RET", "BRX"):
            follows.append(through if last.predicate else [])
        elif last.name == "BSYNC" and n + 1 not in meetings.get(last.operands[0], []):   # out of line: its threads go to where its BSSY says
            earlier = [m for m in meetings.get(last.operands[0], []) if m <= n]
            follows.append(earlier[-1:] or through)
        else:
            follows.append(through)
    # BRX jumps through a table that is not here: to the blocks that nothing else leads to.
    led_to = {0} | {n for nexts in follows for n in nexts}
    cases = [n for n in range(len(blocks)) if n not in led_to]
    return blocks, [nexts + cases * (blocks[n][-1].name == "BRX") for n, nexts in enumerate(follows)]


def _dominators(follows: list[list[int]]) -> list[int | None]:
    """Of each block its immediate dominator (the first block's is itself); None: not reached. Cooper, Harvey and Kennedy's iteration."""
    order = _postorder(0, follows)
    rank = {block: r for r, block in enumerate(order)}
    before: dict[int, list[int]] = {}
    for b in order:
        for n in follows[b]:
            before.setdefault(n, []).append(b)
    above: list[int | None] = [None] * len(follows)
    above[0], changed = 0, True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            new: int | None = None
            for p in before[block]:
                if above[p] is None:
                    continue
                other: int = p
                while new is not None and new != other:
                    if rank[new] < rank[other]:
                        new = above[new]
                    else:
                        other = above[other]   # type: ignore[assignment]
                new = other
            if above[block] != new:
                above[block], changed = new, True
    return above


def _dominates(above: list[int | None], a: int, b: int) -> bool:
    while b != a and above[b] is not None and above[b] != b:
        b = above[b]   # type: ignore[assignment]
    return a == b
