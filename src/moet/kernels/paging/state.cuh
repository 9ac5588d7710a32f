// What the pager keeps and hands on. Kernels, host code (paging/state.py) and the mailbox's server (native/store/mailbox.h) agree on these bytes; every
// struct is a multiple of 8 bytes without padding the compiler chose. Sizes that may change between two steps (slots, staging) are read from here, not captured.
#pragma once
#include "../gpu/gpu.cuh"

constexpr i32 kMaxExperts = 1024;   // of a layer
constexpr i32 kMaxWaves = 64;
constexpr i32 kMaxStaging = 1024;   // slots of a class
constexpr i32 kMaxStrips = 512;     // of 64 columns of the hidden size
constexpr i32 kResolveThreads = 1024;   // of the block that resolves: a thread for each expert, and for each staging slot

// The slots of one class (layers whose rows take one slot size), as cache/reference.py defines them. In device memory.
struct SlotClass {
  i32 rows, slots, staging, ring;   // ring: slots behind the others, [slots, slots + 2 * ring), for scans; not part of the bookkeeping
  u32 hysteresis;
  u32 coldest;                      // no row of the working set is colder; whoever writes heat writes 0 here
  i64 age_every, touches;
  i64 slot_bytes;
  i64 newest, oldest;               // stamps to give next, to a slot that becomes staging's newest / oldest
  u64 evictions, admitted;
  u8* pool;                         // device memory; slot s is at pool + s * slot_bytes
  const u8* arena;                  // pinned host memory; arena slot a is at arena + a * slot_bytes
  const u64* location;              // [rows], pinned host memory: see Mailbox
  i32* slot_of;                     // [rows], -1: none
  i32* row_of;                      // [slots], -1: none
  u32* heat;                        // [rows]
  u32* valid;                       // [slots], 1: the bytes of row_of landed
  i64* stamp;                       // [slots], staging: smaller is older; kWorking: not staging
};
constexpr i64 kWorking = 0x7fffffffffffffffll;

// A distinct expert of the layer in flight.
struct Step {
  i32 expert, row, slot;            // row: within the class. slot: index into the pool, ring slots included
  i32 wave, hit;                    // hit: nothing to fetch
  i32 pair_begin, pair_count;       // its (token, place) pairs in Plan.pairs
  i32 reserved;                     // of a scan's absent row: its position in Absent, else -1
};

// How far fetch is with a row; its own.
struct Fetching {
  u64 location;                     // where the row lies in the arena, as read before its copy
  u32 request;                      // the number of its last request, if there is one
  u32 phase;                        // see fetch.cuh
};

// The layer in flight; written by resolve, read by the launches behind it. In device memory.
struct Plan {
  i32 count, waves, misses, live_tokens;
  i32 wave_begin[kMaxWaves + 1];    // steps of wave w: [wave_begin[w], wave_begin[w + 1]); w <= waves is written, the rest equals count
  i32 reserved;
  u32 ticket[kMaxWaves];            // blocks of wave w's first GEMM that have begun
  u32 item[3][kMaxWaves];           // work handed out in wave w's first and second large GEMM, and in mlp_small
  u32 drawn[kMaxWaves];             // shares of rows handed out to the fetching blocks of wave w
  u64 stall[kMaxWaves];             // the longest that a block of wave w's first GEMM waited for rows; the next resolve adds it to the counters
  u32 ready[kMaxExperts];           // of a step: parts of its row that landed; kFailedRow: it cannot be read
  u32 copied[kMaxExperts];          // of a step: parts whose copy ended, and flags (fetch's own)
  i32 order[kMaxExperts];           // steps in the order in which fetch takes them (fetch's own; -1: not known yet)
  u32 made[kMaxExperts];            // of a step: tiles of its intermediate values that are there (expert_mlp/small.cuh)
  u32 finished[kMaxStrips];         // of the last wave: steps that wrote a strip of the hidden columns (expert_mlp/small.cuh)
  Fetching fetching[kMaxExperts];   // of a step
  Step steps[kMaxExperts];          // by wave, within a wave in the order of the specification
  i32* pairs;                       // [tokens * top_k]: token * top_k + place, by expert, ascending within one
  const u32* ring_ready;            // of a scan: Absent.ready, which Step.reserved indexes; else null
};
constexpr u32 kFailedRow = 0x80000000u;

// Rows of a layer without a valid slot, for a scan: the ring's content, wave after wave. In device memory, two of them: the next layer's is made, and its
// rows are fetched, while this layer's is read.
struct Absent {
  i32 count, waves, ring, reserved; // ring: rows of a wave
  i32 position[kMaxExperts];        // of an expert in `steps`; -1: it has a slot, or is not asked for
  u32 ticket[kMaxWaves];            // blocks of wave w's fetch_ring that have begun
  u32 drawn[kMaxWaves];
  u32 ready[kMaxExperts];           // as Plan's, by position
  u32 copied[kMaxExperts];
  i32 order[kMaxExperts];
  Fetching fetching[kMaxExperts];
  Step steps[kMaxExperts];          // ascending experts; no pairs
};

// Requests for rows that are only on disk, and where the others are. In pinned host memory; written by both sides.
//
// location[row] (one u64 per row of a class): low 32 bits: 1 + arena slot, 0: not in the arena, kFailedLocation: the read for request number (high 32) failed;
// high 32 bits: generation, which differs whenever the slot's bytes do. The CPU sets it to 0, and fences, before it overwrites the slot, so a copy is
// whole if location[row] is the same before and after it.
constexpr u32 kMailboxSize = 4096;  // power of two, more than the rows one layer can miss
constexpr u32 kFailedLocation = 0xffffffffu;
struct Request {
  i32 cls, row;                     // device
  u32 taken, reserved;              // device: 1 + the request's number (mod 2^32) once its row is no longer needed in the arena
};
struct Mailbox {
  u32 posted;                       // device: requests ever posted (mod 2^32); released after the request itself
  u32 stop;                         // host
  u32 reserved[14];
  Request request[kMailboxSize];    // number n (from 0) is in request[n % kMailboxSize]
};

// One of a process. In device memory, except where a pointer says otherwise.
enum Counter : i32 {
  kHits, kMisses, kScanHits, kScanMisses, kWaves, kLayers, kFetchedRows, kFetchedBytes, kArenaMisses, kTornCopies, kFailedRows, kTimeouts,
  kFetchNanoseconds,                // of the fetching blocks' leader, from its first row to its last
  kStallNanoseconds,                // of GEMM blocks that waited for a row, the longest block of a launch
  kSteps, kCounters
};
struct Control {
  u32 armed;                        // 0: no row routes, fetches or heats
  u32 lookup_only;                  // baseline of benchmarks: misses are listed, not fetched
  u32 posted;                       // requests ever posted to the mailbox: Mailbox.posted's own
  u32 timed_out;                    // a wait of this step ran out: the others of the step do not wait
  u64 limit_ns;                     // without progress, before a wait gives up
  u64 counter[kCounters + (kCounters & 1)];
  Mailbox* mailbox;                 // pinned host memory, null: every row is in the arena
  u32* failures;                    // pinned host memory, this rank's word: counted up, sys scope, before a step's output exists
};

// What a launch of a layer gets by value. Everything here is fixed when a graph is captured.
struct LayerArgs {
  SlotClass* slots;
  Control* control;
  Plan* plan;
  const i32* topk_ids;              // [tokens, top_k], negative: a place that routes nowhere
  const i64* kv_slots;              // [tokens], negative: the row is no token; null: all are
  i32 tokens, top_k, experts;
  i32 cls, first_row;               // the class's number; row of expert 0 within it
  i32 begins_step;                  // the first layer of a step: clears timed_out
};

// Of the scans' kernels (scan.cuh).
struct ScanArgs {
  LayerArgs layer;
  Absent* absent;                   // of this layer
  i32 wave;                         // fetch_ring: which one
  i32 ahead;                        // absent_rows: 1: every expert without a slot; 0: those that the layer's topk_ids route to
};

// Of resolve_lookup.
struct LookupArgs {
  LayerArgs layer;
  i32* list;                        // [1 + capacity]: how many, then rows within the class
  i32 capacity, reserved;
};
