// A fiber: a stack of its own and a place in the code. Switching costs a few nanoseconds on x86-64, where it saves what the ABI says a call preserves
// and nothing else; other machines take ucontext, whose two system calls a switch make it a hundred times slower.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(MOET_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void moet_fiber_switch(void** save, void* to);
asm(R"(
.text
.globl moet_fiber_switch
.hidden moet_fiber_switch
.type moet_fiber_switch, @function
moet_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size moet_fiber_switch, .-moet_fiber_switch
)");

namespace emulator {
struct Context {
  void* sp = nullptr;
  void start(char* stack, size_t bytes, void (*entry)()) {
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    auto* word = reinterpret_cast<uint64_t*>(top);
    word[-1] = 0;   // where entry would return to: it never does
    word[-2] = reinterpret_cast<uint64_t>(entry);
    std::memset(word - 8, 0, 6 * sizeof(uint64_t));
    sp = word - 8;
  }
};
inline void switch_context(Context& from, Context& to) { moet_fiber_switch(&from.sp, to.sp); }
}  // namespace emulator
#else
#include <ucontext.h>

namespace emulator {
struct Context {
  ucontext_t u;
  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&u);
    u.uc_stack.ss_sp = stack;
    u.uc_stack.ss_size = bytes;
    u.uc_link = nullptr;
    makecontext(&u, entry, 0);
  }
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.u, &to.u); }
}  // namespace emulator
#endif
