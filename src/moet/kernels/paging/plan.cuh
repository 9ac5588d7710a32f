// What every kernel that writes a Plan does to it.
#pragma once
#include "state.cuh"

// Rows are lost: this rank's word grows before the launch ends. One block of a process at a time.
DEVICE void count_failures(Control& control, u32 rows) {
  count_gpu(&control.counter[kFailedRows], rows);
  if (control.failures) store_release_sys(control.failures, load_acquire_sys(control.failures) + rows);
}

// All threads from number `first` on; a barrier comes before anything else writes these words. Loops stay loops: between layers of weights
// this code takes 0.7 us longer than by itself.
DEVICE void clear(Plan& plan, Control& control, i32 experts, i32 first = 0) {
  const i32 t = thread_id() - first, step = thread_count() - first;
  if (t < 0) return;
#pragma unroll 1
  for (i32 i = t; i < experts; i += step) plan.ready[i] = 0, plan.copied[i] = 0, plan.order[i] = -1, plan.made[i] = 0;
#pragma unroll 1
  for (i32 i = t; i < kMaxStrips; i += step) plan.finished[i] = 0;
#pragma unroll 1
  for (i32 w = t; w < kMaxWaves; w += step) {
    plan.ticket[w] = plan.item[0][w] = plan.item[1][w] = plan.item[2][w] = plan.drawn[w] = 0;
    if (const u64 waited = plan.stall[w]) {
      count_gpu(&control.counter[kStallNanoseconds], waited);
      plan.stall[w] = 0;
    }
  }
}

DEVICE void begin_layer(const LayerArgs& a, bool armed) {
  if (thread_id() || !a.begins_step) return;
  a.control->timed_out = 0;
  if (armed) count_gpu(&a.control->counter[kSteps], 1);
}

// Where each wave's steps begin, in the plan and in shared memory.
DEVICE void write_waves(Plan& plan, const u32* in_wave, i32 waves, i32* first) {
  for (i32 wave = thread_id(); wave <= kMaxWaves; wave += thread_count()) {
    u32 before = 0;
    for (i32 w = 0; w < wave && w < waves; ++w) before += in_wave[w];
    first[wave] = plan.wave_begin[wave] = static_cast<i32>(before);
  }
}

// One thread. misses: all that are not hits.
DEVICE void finish_plan(Plan& plan, i32 count, i32 waves, i32 misses, i32 live, const u32* ring_ready) {
  plan.count = count, plan.waves = waves, plan.misses = misses, plan.live_tokens = live;
  plan.ring_ready = ring_ready;
}
