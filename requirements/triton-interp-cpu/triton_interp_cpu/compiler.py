"""What Triton asks a compiler at import. Compiling is refused: the interpreter never asks for it."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-interpreter"

    def parse_options(self, options: dict):
        raise NotImplementedError("this backend only interprets: set TRITON_INTERPRET=1")

    def add_stages(self, stages, options, language=None) -> None:
        raise NotImplementedError("this backend only interprets: set TRITON_INTERPRET=1")

    def load_dialects(self, ctx) -> None:
        pass

    def get_module_map(self) -> dict:
        return {}

    def pack_metadata(self, metadata) -> tuple:
        return ()

    def get_codegen_implementation(self, options) -> dict:
        return {}
