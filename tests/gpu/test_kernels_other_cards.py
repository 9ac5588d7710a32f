"""The kernels as other cards get them, on this one: MOET_ARCH chooses in their source how products are made, how much shared memory a block has and how many groups of
warps. Only instructions that this card lacks are left out by it."""

import functools

import pytest
from random_layers import draw
from test_kernels_bounds import check_case, poisoned_outputs  # noqa: F401 (a fixture)

from moet.kernels.expert_mlp.cuda import SOURCES
from moet.kernels.gpu.module import CudaModule
from moet.layout import FORMATS
from moet.moe.device import PAGER_SOURCES

ARCHITECTURES = {80: ("tcq2", "mxfp4", "fp8", "bf16"), 89: FORMATS, 120: ("tcq2", "nvfp4", "fp8_row")}
SEEDS = (1, 3, 6, 7)   # short sums and long ones


class InTurn:
    """Kernels that are launched one after the other: before compute capability 9.0 they do not wait for the launch before."""

    def __init__(self, module) -> None:
        self.module = module

    def launch(self, *args, early: bool = False, **options) -> None:
        self.module.launch(*args, **options)


@functools.cache
def module_for(arch: int, format: int, emulated: bool):
    """format: a row format's number, or -1: the pager."""
    sources, defines = (PAGER_SOURCES if format < 0 else SOURCES), {"MOET_ARCH": arch} | ({} if format < 0 else {"FORMAT": format})
    if emulated:
        from tests.cpu.emulator.build import EmulatedModule

        return EmulatedModule(sources, defines)
    module = CudaModule(sources, defines)
    return module if arch >= 90 else InTurn(module)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("arch", "format"), [(arch, format) for arch, formats in ARCHITECTURES.items() for format in formats])
def test_random_layers_as_on_another_card(arch, format, seed, opened, emulated, reduced):
    def opened_for(*args, **options):
        runtime = opened(*args, **options)
        for kernels in runtime._kernels.values():
            for name, value in (("arch", arch), ("module", module_for(arch, FORMATS.index(format), emulated)), ("pager", module_for(arch, -1, emulated))):
                object.__setattr__(kernels, name, value)   # frozen: nothing but a test has another card's
        return runtime

    check_case(draw(format, seed, emulated or reduced), opened_for, emulated)
