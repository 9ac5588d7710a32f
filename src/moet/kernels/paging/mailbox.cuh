// The device's side of the mailbox: requests for rows that are not in the arena. One block of a process posts at a time.
#pragma once
#include "state.cuh"

DEVICE void write_request(Mailbox& mailbox, u32 number, i32 cls, i32 row) {
  Request& request = mailbox.request[number % kMailboxSize];
  request.cls = cls, request.row = row;
}

// One thread, after a barrier behind the writes: requests up to `end` count.
DEVICE void post(Control& control, u32 end) {
  count_gpu(&control.counter[kArenaMisses], end - control.posted);
  control.posted = end;
  fence_sys();
  store_release_sys(&control.mailbox->posted, end);
}

// The row of this request may leave the arena.
DEVICE void release_request(Mailbox& mailbox, u32 number) { store_release_sys(&mailbox.request[number % kMailboxSize].taken, number + 1); }
