// How missing rows come into their slots, by the first blocks of the launch that needs them. README.md says why no block here waits for one that might not
// be running.
//
// The rows of a wave are a list (Rows); a row is cut into equal shares, and blocks draw shares. Block 0, the leader, knows where rows are: it asks the
// mailbox for those that are not in the arena, puts rows into `order` as soon as they are there, and copies shares like the others in between. Whoever
// copies the last share of a row looks whether it lies where it lay before; if not, what was copied may be torn, and the leader gets the row again, alone.
#pragma once
#include "copy.cuh"
#include "mailbox.cuh"
#include "plan.cuh"

constexpr u32 kRequested = 1u << 29;   // in `copied`: the mailbox holds the row for us
constexpr u32 kTornRow = 1u << 30;     // in `ready`: copied, but not whole
constexpr i32 kUnknown = -1, kNothing = -2;   // in `order`
enum Phase : u32 { kFound, kWaiting, kCopying, kTorn, kAgain, kDone };   // Fetching.phase, the leader's

struct Rows {                 // of a wave, [begin, end) of `steps` and what goes with them
  const Step* steps;
  Fetching* fetching;
  u32 *ready, *copied;
  i32* order;
  u32* drawn;
  i32 begin, end;
};

// One thread: the row is whole.
DEVICE void commit(const LayerArgs& a, const Rows& rows, i32 i, i32 parts, bool requested) {
  SlotClass& c = *a.slots;
  const Step& step = rows.steps[i];
  if (step.slot < c.slots && c.row_of[step.slot] == step.row) c.valid[step.slot] = 1;   // another row may have the slot in a later wave
  if (requested) release_request(*a.control->mailbox, rows.fetching[i].request);
  count_gpu(&a.control->counter[kFetchedRows], 1);
  count_gpu(&a.control->counter[kFetchedBytes], static_cast<u64>(c.slot_bytes));
  store_release_gpu(&rows.ready[i], static_cast<u32>(parts));
}

// One thread, after a barrier behind the copy.
DEVICE bool unchanged(const LayerArgs& a, const Rows& rows, i32 i) {
  fence_sys();   // the copy's loads, then this one
  if (load_acquire_sys(&a.slots->location[rows.steps[i].row]) == rows.fetching[i].location) return true;
  count_gpu(&a.control->counter[kTornCopies], 1);
  return false;
}

// All threads.
DEVICE void copy_share(const LayerArgs& a, const Rows& rows, i32 i, i32 part, i32 parts) {
  const SlotClass& c = *a.slots;
  const i64 share = (c.slot_bytes / 16 + parts - 1) / parts * 16, begin = part * share;
  const i64 bytes = c.slot_bytes - begin < share ? c.slot_bytes - begin : share;
  copy_bytes(c.pool + rows.steps[i].slot * c.slot_bytes + begin, source_of(c, rows.fetching[i].location) + begin, bytes);
  sync_block();
  if (thread_id()) return;
  fence_gpu();
  const u32 copied = atomic_add_gpu(&rows.copied[i], 1) + 1;
  if ((copied & 0xffff) != static_cast<u32>(parts)) return;
  if (unchanged(a, rows, i)) commit(a, rows, i, parts, copied & kRequested);
  else store_release_gpu(&rows.ready[i], kTornRow);
}

struct Leader {               // in shared memory
  u32 requests, known, open, progress, failed;
  u32 torn_rows, here_again;
  i32 torn, again;            // one of the rows that are to be asked for again; one of those that are there again
  i32 step, part;
  bool give_up;
};

DEVICE void append(const Rows& rows, Leader& s, i32 i) {
  rows.fetching[i].phase = kCopying;
  store_release_gpu(reinterpret_cast<u32*>(&rows.order[rows.begin + static_cast<i32>(atomic_add_shared(&s.known, 1))]), static_cast<u32>(i));
}

DEVICE void lose(const LayerArgs& a, const Rows& rows, Leader& s, i32 i, bool requested) {
  rows.fetching[i].phase = kDone;
  if (requested) release_request(*a.control->mailbox, rows.fetching[i].request);
  atomic_add_shared(&s.failed, 1);
  store_release_gpu(&rows.ready[i], kFailedRow);
}

// All threads: finds the rows, posts requests for the absent ones, then hands out those that are there.
DEVICE void locate(const LayerArgs& a, const Rows& rows, Leader& s) {
  Control& control = *a.control;
  const u32 posted = control.posted;
  const bool asks = control.mailbox && !s.give_up;
  for (i32 i = rows.begin + thread_id(); i < rows.end; i += thread_count()) {
    Fetching& f = rows.fetching[i];
    if (rows.ready[i] == kFailedRow) {   // it failed before: no wave was left for it
      f.phase = kDone;
      continue;
    }
    const i32 row = rows.steps[i].row;
    f.location = load_acquire_sys(&a.slots->location[row]);
    f.phase = kFound;
    if (in_arena(f.location)) continue;
    if (!asks) {
      lose(a, rows, s, i, false);
      continue;
    }
    f.phase = kWaiting;
    f.request = posted + atomic_add_shared(&s.requests, 1);
    rows.copied[i] = kRequested;
    write_request(*control.mailbox, f.request, a.cls, row);
  }
  sync_block();
  if (thread_id() == 0 && s.requests) post(control, posted + s.requests);
  for (i32 i = rows.begin + thread_id(); i < rows.end; i += thread_count())
    if (rows.fetching[i].phase == kFound) append(rows, s, i);
}

// All threads: what became of each row since the last look.
DEVICE void look(const LayerArgs& a, const Rows& rows, Leader& s, i32 parts) {
  for (i32 i = rows.begin + thread_id(); i < rows.end; i += thread_count()) {
    Fetching& f = rows.fetching[i];
    if (f.phase == kDone) continue;
    if (f.phase == kCopying) {
      const u32 ready = load_acquire_gpu(&rows.ready[i]);
      if (ready == static_cast<u32>(parts)) f.phase = kDone;
      if (ready == kTornRow) f.phase = kTorn;
      if (f.phase != kCopying) atomic_add_shared(&s.progress, 1);
    } else if (f.phase == kWaiting || f.phase == kAgain) {
      const u64 location = load_acquire_sys(&a.slots->location[rows.steps[i].row]);
      if (in_arena(location)) {
        atomic_add_shared(&s.progress, 1);
        f.location = location;
        if (f.phase == kWaiting) append(rows, s, i);
        else if (atomic_add_shared(&s.here_again, 1) == 0) s.again = i;
      } else if (s.give_up || read_failed(location, f.request)) {
        atomic_add_shared(&s.progress, 1);
        lose(a, rows, s, i, rows.copied[i] & kRequested);
      }
    }
    if (f.phase == kTorn && atomic_add_shared(&s.torn_rows, 1) == 0) s.torn = i;
    if (f.phase != kDone) atomic_add_shared(&s.open, 1);
  }
}

// One thread: asks for a torn row again.
DEVICE void ask_again(const LayerArgs& a, const Rows& rows, i32 i) {
  Control& control = *a.control;
  Fetching& f = rows.fetching[i];
  f.phase = kAgain;
  if (!control.mailbox) return;   // nobody moves rows: it is where it is
  if (rows.copied[i] & kRequested) release_request(*control.mailbox, f.request);
  rows.copied[i] = kRequested;
  f.request = control.posted;
  write_request(*control.mailbox, f.request, a.cls, rows.steps[i].row);
  post(control, f.request + 1);
}

// counts: rows that cannot be read are failures, here and now.
DEVICE void lead(const LayerArgs& a, const Rows& rows, i32 parts, bool counts) {
  SHARED(Leader, s);
  Control& control = *a.control;
  const i32 count = rows.end - rows.begin;
  i32 held = -1;              // thread 0's: a share that it drew, of a row that was not there yet
  bool drawn_out = false;
  const u64 begin = nanoseconds();
  u64 last = begin;           // when something went on
  if (thread_id() == 0) s.requests = s.known = s.failed = 0, s.give_up = control.timed_out != 0;
  sync_block();
  locate(a, rows, s);
  for (;;) {
    sync_block();
    if (thread_id() == 0) s.open = s.progress = s.torn_rows = s.here_again = 0, s.torn = s.again = s.step = -1;
    sync_block();
    look(a, rows, s, parts);
    sync_block();
    if (!s.open) break;
    if (thread_id() == 0) {
      if (s.torn >= 0) ask_again(a, rows, s.torn);
      if (held < 0 && !drawn_out) {
        held = static_cast<i32>(atomic_add_gpu(rows.drawn, 1));
        if (held >= count * parts) held = -1, drawn_out = true;
      }
      if (held >= 0 && held / parts < static_cast<i32>(s.known)) {
        s.step = rows.order[rows.begin + held / parts], s.part = held % parts;
        held = -1;
      }
      const u64 now = nanoseconds();
      if (s.progress || s.step >= 0) {
        last = now;
      } else if (now - last > control.limit_ns && !s.give_up) {
        s.give_up = true;
        control.timed_out = 1;
        count_gpu(&control.counter[kTimeouts], 1);
      } else if (s.again < 0) {
        pause(500);
      }
    }
    sync_block();
    const i32 again = s.again, step = s.step;
    if (again >= 0) {
      const SlotClass& c = *a.slots;
      copy_bytes(c.pool + rows.steps[again].slot * c.slot_bytes, source_of(c, rows.fetching[again].location), c.slot_bytes);
      sync_block();
      if (thread_id() == 0) {
        if (!unchanged(a, rows, again)) {
          rows.fetching[again].phase = kTorn;
        } else {
          rows.fetching[again].phase = kDone;
          commit(a, rows, again, parts, rows.copied[again] & kRequested);
        }
      }
    }
    if (step >= 0) copy_share(a, rows, step, s.part, parts);
  }
  for (i32 k = static_cast<i32>(s.known) + thread_id(); k < count; k += thread_count())   // of rows that failed: nobody waits for them
    store_release_gpu(reinterpret_cast<u32*>(&rows.order[rows.begin + k]), static_cast<u32>(kNothing));
  if (thread_id() == 0) {
    count_gpu(&control.counter[kFetchNanoseconds], nanoseconds() - begin);
    if (counts && s.failed) count_failures(control, s.failed);
  }
  sync_block();
}

DEVICE void follow(const LayerArgs& a, const Rows& rows, i32 parts) {
  struct Share { i32 step, part; };
  SHARED(Share, s);
  for (;;) {
    if (thread_id() == 0) {
      const i32 share = static_cast<i32>(atomic_add_gpu(rows.drawn, 1)), k = share / parts;
      s.step = kNothing, s.part = share % parts;
      if (k < rows.end - rows.begin)
        while ((s.step = static_cast<i32>(load_acquire_gpu(reinterpret_cast<u32*>(&rows.order[rows.begin + k])))) == kUnknown) pause(200);
    }
    sync_block();
    const i32 step = s.step, part = s.part;
    sync_block();
    if (step == kNothing) return;
    copy_share(a, rows, step, part, parts);
  }
}

// All threads of a block: copies shares of the missing rows of a wave until none is left. part: the block's number among those that began, 0 leads; parts:
// shares of a row.
DEVICE void fetch_rows(const LayerArgs& a, i32 wave, i32 part, i32 parts) {
  Plan& plan = *a.plan;
  if (a.control->lookup_only) return;
  const i32 begin = wave ? plan.wave_begin[wave] : plan.count - plan.misses;   // hits are the first steps
  const Rows rows = {plan.steps, plan.fetching, plan.ready, plan.copied, plan.order, &plan.drawn[wave], begin, plan.wave_begin[wave + 1]};
  if (rows.begin >= rows.end) return;
  if (part == 0) lead(a, rows, parts, true);
  else follow(a, rows, parts);
}

// The row of a step that was fetched before this launch cannot be read.
DEVICE bool row_failed(const Plan& plan, i32 step) {
  const i32 position = plan.ring_ready ? plan.steps[step].reserved : -1;
  return load_acquire_gpu(position >= 0 ? &plan.ring_ready[position] : &plan.ready[step]) == kFailedRow;
}

// All threads of one block, after a layer's last wave: failures of the rows that came through the ring, which were fetched before it was known who wants them.
DEVICE void count_lost(const LayerArgs& a) {
  SHARED(u32, lost);
  const Plan& plan = *a.plan;
  if (!plan.ring_ready) return;
  if (thread_id() == 0) lost = 0;
  sync_block();
  u32 mine = 0;
  for (i32 i = thread_id(); i < plan.count; i += thread_count()) mine += plan.steps[i].reserved >= 0 && row_failed(plan, i);
  if (mine) atomic_add_shared(&lost, mine);
  sync_block();
  if (thread_id() == 0 && lost) count_failures(*a.control, lost);
}

// One thread: waits until the row of a step is there. False: it cannot be read. Adds the nanoseconds that it waited.
DEVICE bool await_row(const LayerArgs& a, i32 step, i32 parts, u64& waited) {
  Plan& plan = *a.plan;
  if (plan.steps[step].hit) return true;
  const u32* p = &plan.ready[step];
  u32 ready = load_acquire_gpu(p);
  if (ready == static_cast<u32>(parts) || ready == kFailedRow) return ready != kFailedRow;
  const u64 begin = nanoseconds();
  do {
    pause(200);
    ready = load_acquire_gpu(p);
  } while (ready != static_cast<u32>(parts) && ready != kFailedRow);
  waited += nanoseconds() - begin;
  return ready != kFailedRow;
}
// The same for all threads of a block; thread 0 waits.
DEVICE bool wait_row(const LayerArgs& a, i32 step, i32 parts, u64& waited) {
  SHARED(bool, readable);
  if (a.plan->steps[step].hit) return true;
  if (thread_id() == 0) readable = await_row(a, step, parts, waited);
  sync_block();
  const bool there = readable;
  sync_block();   // before the next call writes it
  return there;
}
DEVICE bool wait_row(const LayerArgs& a, i32 step, i32 parts) {
  u64 waited = 0;
  return wait_row(a, step, parts, waited);
}

// What this thread waited for the wave's rows, all in all.
DEVICE void count_stall(const LayerArgs& a, i32 wave, u64 waited) {
  if (waited) maximum_gpu(&a.plan->stall[wave], waited);
}
