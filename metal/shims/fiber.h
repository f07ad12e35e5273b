// Switches between stacks on one CPU thread: saves the registers that a function must
// preserve, changes the stack, restores them.  About 2 ns.
#pragma once
#include <cstdint>

namespace emulator {

// Saves the running fibre in *save and continues the fibre saved in `load`.
__attribute__((visibility("hidden"))) void switch_fiber(void** save, void* load) asm(
    "h2o_emulator_switch_fiber");

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
h2o_emulator_switch_fiber:
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
  popq %rdx
  jmp *%rdx            # a ret here would be mispredicted every time
)");
inline constexpr int kSavedWords = 8;  // six registers, the address, alignment
inline constexpr int kEntryWord = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
h2o_emulator_switch_fiber:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline constexpr int kSavedWords = 20;
inline constexpr int kEntryWord = 11;  // x30, the return address
#else
#error "The emulator has no stack switch for this processor; add one here."
#endif

// The value to load to start `entry` on an empty stack that ends at `top`.
inline void* new_fiber(char* top, void (*entry)()) {
  void** saved = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  saved -= kSavedWords;
  for (int i = 0; i < kSavedWords; i++) {
    saved[i] = nullptr;
  }
  saved[kEntryWord] = reinterpret_cast<void*>(entry);
  return saved;
}

}  // namespace emulator
