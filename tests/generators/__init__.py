"""Tiny random checkpoints in the layouts that the models' publishers use: names, dtypes, shapes and config.json texts.

Nothing here imports moet, so what these programs write is evidence about moet and not an echo of it. A writer takes
an empty folder and returns a `Truth`: the float64 value of every routed expert it wrote.

    from tests.generators import write_qwen3_moe
    truth = write_qwen3_moe(tmp_path, scheme="fp8_block")
"""

from .deepseek import write_deepseek_v2, write_deepseek_v3, write_deepseek_v32
from .deepseek_v4 import write_deepseek_v4
from .glm import write_glm4_moe, write_glm_moe_dsa
from .gpt_oss import write_gpt_oss
from .kimi import write_kimi_k2, write_kimi_k25
from .mixtral import write_minimax_m2, write_mixtral
from .qwen import write_olmoe, write_qwen3_moe
from .truth import Expert, Truth

__all__ = [
    "Expert",
    "Truth",
    "write_deepseek_v2",
    "write_deepseek_v3",
    "write_deepseek_v4",
    "write_deepseek_v32",
    "write_glm4_moe",
    "write_glm_moe_dsa",
    "write_gpt_oss",
    "write_kimi_k2",
    "write_kimi_k25",
    "write_minimax_m2",
    "write_mixtral",
    "write_olmoe",
    "write_qwen3_moe",
]
