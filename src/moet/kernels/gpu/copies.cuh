// Copies from device to shared memory that go on beside other work (sm_80 and newer), and what mma_bf16 takes from there. Addresses are aligned to the size of the
// copy.
#pragma once
#include "gpu.cuh"

#ifndef MOET_EMULATOR
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
DEVICE void copy_async16(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory"); }
// The same to a shared address, without a branch, which would part what is scheduled around it.
DEVICE void copy_async16_if(bool there, u32 to, const void* from) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16;\n\t}" :: "r"(to), "l"(from), "r"(static_cast<i32>(there)) : "memory");
}
DEVICE void copy_async4(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory"); }
DEVICE void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }   // those of this thread
// A thread's copies since its last commit are a group; it waits until no more than n groups are under way.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <i32 n> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }
// Four matrices of 8 rows of 16 bytes; lanes 8i .. 8i + 7 say where rows 0 .. 7 of matrix i lie. Lane (g, t) gets bytes 4t .. 4t + 3 of row g of each.
DEVICE void load_matrices(u32* m, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}
#endif
