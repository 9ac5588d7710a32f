// Copies from device to shared memory that go on beside other work (sm_80 and newer). Addresses are aligned to the size of the copy.
#pragma once
#include "gpu.cuh"

#ifndef MOET_EMULATOR
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEVICE void copy_async16(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory"); }
DEVICE void copy_async4(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory"); }
// Zeros, of 16 bytes, where nothing is there to copy.
DEVICE void copy_async16_if(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }   // those of this thread
// A thread's copies since its last commit are a group; it waits until no more than n groups are under way.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <i32 n> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }
#endif
