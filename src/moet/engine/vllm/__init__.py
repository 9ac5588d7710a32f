"""The vLLM plugin: entry point `vllm.general_plugins`, called by vLLM in each of its processes.

Nothing is imported here: vLLM swallows what an import raises, and would serve without the plugin; what `register` raises, it passes on.
"""


def register() -> None:
    """Lets vLLM recognise a pack, or `--additional-config '{"moet": {...}}'`, and nothing else. May be called more than once.

    Raises EngineError if vLLM no longer has the one method that everything starts from.
    """
    from moet.engine.vllm.entry import install

    install()
