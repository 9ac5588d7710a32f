#include "experts.h"

#include <algorithm>
#include <cstring>

#include "../kernels/kernels.h"

namespace moet {
namespace {

// Tokens that share one pass over a block. Sums (12 KiB), activations (6 KiB) and the block stay in a 32 KiB L1.
constexpr int kTokens = 48;

// Bytes between what is computed and what is prefetched: at 15 GB/s a core, 6 KiB are 0.4 us, some four times the memory's latency.
constexpr int64_t kAhead = 6144;

float load_float(const uint8_t* p) { float f; std::memcpy(&f, p, 4); return f; }

struct Runner {
  const MlpSettings& s;
  const std::vector<ExpertJob>& jobs;
  const int format = s.geometry.format;
  const int acts = acts_of(format, s.acts);
  const int group = group_bytes(acts);
  const int hidden_padded = s.geometry.hidden_padded();
  const int row_blocks = hidden_padded / kBlockRows;
  const RunBlocks run = kernels().run[format][acts];

  void pack(const ExpertJob& job, int token) const {
    pack_token(format, acts, job.x[token], s.geometry.hidden, job.io + int64_t(token) * group, int64_t(job.tokens) * group);
  }

  // 32 intermediate values of every token: the tile's gate and up rows, then the activation.
  void up_tile(const ExpertJob& job, int tile) const {
    const int64_t tile_bytes = s.geometry.w13_tile_bytes();
    const uint8_t* blocks = job.view.w13 + tile * tile_bytes;
    const int valid = s.geometry.values(s.tile_begin + tile);   // the padded rows' weights are not zeros in every format
    const float gate_multiplier = load_float(job.view.extras), up_multiplier = load_float(job.view.extras + 4);
    float bias[kBlockRows] = {};
    if (s.geometry.biased) std::memcpy(bias, blocks + tile_bytes - 256, 256);
    const int64_t ahead = std::max(kAhead, 2 * int64_t(block_bytes(format)));
    alignas(64) float sums[kTokens * kBlockRows];
    for (int first = 0; first < job.tokens; first += kTokens) {
      const int count = std::min(kTokens, job.tokens - first);
      std::fill_n(sums, count * kBlockRows, 0.0f);
      run({blocks, hidden_padded / kBlockCols, job.io + int64_t(first) * group, int64_t(job.tokens) * group, count, sums, kBlockRows, 0, ahead});
      for (int m = 0; m < count; ++m) {
        float* gate = sums + m * kBlockRows;
        float* up = gate + kTile;
        for (int i = 0; i < kTile; ++i) gate[i] = gate[i] * gate_multiplier + bias[i];
        for (int i = 0; i < kTile; ++i) up[i] = up[i] * up_multiplier + bias[kTile + i];
        float values[kTile] = {};
        activate(s.activation, gate, up, valid, values);
        pack_group(format, acts, values, job.middle + (int64_t(tile) * job.tokens + first + m) * group);
      }
    }
  }

  // Rows [64 begin, 64 end) of the result of every token: over the slice's tiles in order.
  void down_rows(const ExpertJob& job, int begin, int end) const {
    const int64_t tile_bytes = s.geometry.w2_tile_bytes();
    float* result = reinterpret_cast<float*>(job.io);
    const float multiplier = load_float(job.view.extras + 8);
    const uint8_t* bias = job.view.extras + 16;
    for (int first = 0; first < job.tokens; first += kTokens) {
      const int count = std::min(kTokens, job.tokens - first);
      float* out = result + int64_t(first) * hidden_padded;
      for (int m = 0; m < count; ++m) std::fill_n(out + m * int64_t(hidden_padded) + begin * kBlockRows, (end - begin) * kBlockRows, 0.0f);
      for (int tile = 0; tile < s.tiles; ++tile)
        run({job.view.w2 + tile * tile_bytes + int64_t(begin) * block_bytes(format), end - begin,
             job.middle + (int64_t(tile) * job.tokens + first) * group, 0, count, out + begin * kBlockRows, hidden_padded, kBlockRows,
             tile_bytes});   // the next tile's piece is the next to be read
      for (int m = 0; m < count; ++m)
        for (int row = begin * kBlockRows; row < end * kBlockRows; ++row) {
          float& value = out[m * int64_t(hidden_padded) + row];
          value = value * multiplier + (s.down_bias ? load_float(bias + 4 * row) : 0.0f);
        }
    }
  }
};

}  // namespace

int64_t io_bytes(const MlpSettings& s, int64_t tokens) {
  const int64_t packed = int64_t(s.geometry.hidden_padded() / 32) * group_bytes(acts_of(s.geometry.format, s.acts));
  return tokens * std::max(packed, int64_t(4) * s.geometry.hidden_padded());
}

int64_t middle_bytes(const MlpSettings& s, int64_t tokens) { return tokens * s.tiles * group_bytes(acts_of(s.geometry.format, s.acts)); }

void run_experts(Pool& pool, const MlpSettings& settings, const std::vector<ExpertJob>& jobs) {
  const Runner runner{settings, jobs};
  std::vector<std::pair<int32_t, int32_t>> tokens;   // (job, token)
  for (size_t j = 0; j < jobs.size(); ++j)
    for (int t = 0; t < jobs[j].tokens; ++t) tokens.emplace_back(j, t);
  pool.run(int64_t(tokens.size()), [&](int64_t i) { runner.pack(jobs[tokens[i].first], tokens[i].second); });

  const int64_t count = int64_t(jobs.size());
  if (settings.tiles) pool.run(count * settings.tiles, [&](int64_t i) { runner.up_tile(jobs[i / settings.tiles], int(i % settings.tiles)); });

  // Long pieces of a tile's row blocks stream best; 8 tasks a thread keep the threads equally busy.
  const int64_t wanted = (count * runner.row_blocks + 8 * pool.threads() - 1) / (8 * pool.threads());
  const int piece = int(std::clamp<int64_t>(wanted, 2, 64)), pieces = (runner.row_blocks + piece - 1) / piece;
  pool.run(count * pieces, [&](int64_t i) {
    const int begin = int(i % pieces) * piece;
    runner.down_rows(jobs[i / pieces], begin, std::min(begin + piece, runner.row_blocks));
  });
}

}  // namespace moet
