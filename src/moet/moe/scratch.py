"""What a layer's launches hand to each other, in device memory. Nothing of it outlives a layer."""

import torch

from moet.kernels.expert_mlp.cuda import MlpArgs, Planes, padded
from moet.kernels.expert_mlp.scaled import mxfp8_row_bytes


class Scratch:
    """tokens: of the largest batch; few: of the largest one that the small kernels have a part in. stride: act_stride, of the widest layer."""

    def __init__(self, tokens: int, few: int, top_k: int, hidden: int, stride: int, device: torch.device) -> None:
        def bytes_(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.uint8, device=device)

        self.act = torch.empty(tokens * top_k, max(stride, mxfp8_row_bytes(stride) // 2), dtype=torch.bfloat16, device=device)
        self.y = torch.empty(tokens * top_k, hidden, dtype=torch.bfloat16, device=device)
        self.x_large, self.x_codes = bytes_(tokens, max(2 * padded(hidden), mxfp8_row_bytes(hidden))), bytes_(few, 2 * padded(hidden))
        self.x_exponents, self.act_exponents = bytes_(few, padded(hidden) // 32 * 4), bytes_(few * top_k, stride // 32 * 4)
        self.x_broken, self.act_broken = bytes_(few, 4), bytes_(few * top_k, 4)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.act, self.y, self.x_large, self.x_codes, self.x_exponents, self.act_exponents, self.x_broken, self.act_broken]

    def give(self, args: MlpArgs) -> None:
        args.act, args.y = self.act.data_ptr(), self.y.data_ptr()
        args.x_large = self.x_large.data_ptr()
        args.x_planes = Planes(self.x_codes.data_ptr(), self.x_exponents.data_ptr(), self.x_broken.data_ptr())
        args.act_planes = Planes(self.act.data_ptr(), self.act_exponents.data_ptr(), self.act_broken.data_ptr())
