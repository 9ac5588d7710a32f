"""Random FP4 weights as checkpoints store them, and their values."""

import torch

_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def nibbles(experts: int, rows: int, columns: int, device: torch.device, seed: int) -> torch.Tensor:
    """uint8 [experts, rows, columns / 2]; the low nibble is the even column."""
    out = torch.empty((experts, rows, columns // 2), dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    out.view(-1).view(torch.int64).random_(-(1 << 63), (1 << 63) - 1, generator=generator)
    return out


def scale_bytes(experts: int, rows: int, groups: int, low: int, span: int, device: torch.device, seed: int) -> torch.Tensor:
    """uint8 [experts, rows, groups]: UE8M0 or E4M3 bytes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(low, low + span, (experts, rows, groups), dtype=torch.uint8, device=device, generator=generator)


def values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns] of one expert: packed uint8 [rows, columns / 2], scales float32 [rows, groups]."""
    table = torch.tensor(_E2M1, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    return table[codes] * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
