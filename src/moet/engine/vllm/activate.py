"""Puts moet's hooks into this process of vLLM. Called only where moet is on; a process that serves another model keeps the stock classes."""

import functools


@functools.cache
def activate() -> None:
    """Checks vLLM's private interfaces, then registers quantization configs, the model loader, the linear kernel, and the hooks for failed rows and for
    a stop.

    Raises EngineError if vLLM is not one that this version knows.
    """
    from moet.engine.vllm import compat

    compat.check()
    compat.check_cuda()
    from moet.engine.vllm import cpu_linear, failure, loader, quant, shutdown

    quant.register()
    loader.register()
    cpu_linear.register()
    failure.install()
    shutdown.install()
