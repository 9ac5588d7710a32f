// The formats of a row (docs/row-format.md). FORMAT is the number of the row's format in moet.layout.FORMATS.
#pragma once
#include "../gpu/gpu.cuh"

enum Format : i32 { kSym2 = 0, kMxfp4 = 1, kNvfp4 = 2, kFp8 = 3, kFp8Row = 4, kBf16 = 5, kTcq2 = 6 };
#ifndef FORMAT
#error "FORMAT: expected the number of a row format"
#endif
constexpr i32 kFormat = FORMAT;
constexpr i32 kBits = kFormat == kSym2 || kFormat == kTcq2 ? 2 : kFormat <= kNvfp4 ? 4 : kFormat <= kFp8Row ? 8 : 16;
constexpr i32 kCodeBytes = 64 * 32 * kBits / 8;
constexpr i32 kScaleBytes = kFormat == kFp8 ? 16 : kFormat == kFp8Row ? 256 : kFormat == kNvfp4 ? 128 : kFormat == kBf16 ? 0 : 64;
constexpr i32 kBlockBytes = kCodeBytes + kScaleBytes;

DEVICE Vec4 load_words(const u8* p) { return *reinterpret_cast<const Vec4*>(p); }
DEVICE u32 load_word(const u8* p) { return *reinterpret_cast<const u32*>(p); }
DEVICE float load_float(const u8* p) { return *reinterpret_cast<const float*>(p); }
DEVICE u32 word_of(const Vec4& v, i32 r) { return r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w; }
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

// In shared memory the 16 units of 16 bytes of a block's step s lie swizzled: u at u ^ 2 (s / kEach), since eight lanes read two rows' units of steps kEach apart, four
// of them (two with 2 bits), at once, which would share banks.
constexpr i32 kEach = kBits <= 4 ? 1 : kBits / 4;
DEVICE u32 swizzled(i32 step, i32 unit) { return 256 * step + 16 * (unit ^ (2 * (step / kEach))); }
