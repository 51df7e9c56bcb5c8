#pragma once

#include <cstddef>
#include <vector>

// Switches of contexts: by Boost.Context where CMake finds it (MOE_SIMT_BOOST_CONTEXT); by a few
// instructions of our own on x86-64; else by ucontext, which every Linux has, for the first entry,
// and _longjmp afterwards, which needs no system call.
#if !defined(MOE_SIMT_BOOST_CONTEXT) && !defined(MOE_SIMT_UCONTEXT) && !defined(__x86_64__)
#define MOE_SIMT_UCONTEXT
#endif

#if defined(MOE_SIMT_UCONTEXT)
#include <setjmp.h>
#endif

namespace moe::simt {

/// A thread of control that one OS thread switches to and from: a stack and the registers that
/// survive a call.
///
/// A context stays on the OS thread that entered it first.
class Context {
 public:
  using Entry = void (*)(void* argument);

  /// The OS thread that runs already.
  Context() = default;
  /// Runs @p entry on @p stack once it is switched to; entry never returns.
  Context(std::byte* stack, size_t stack_bytes, Entry entry, void* argument);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Leaves *this, which runs, for @p next; returns when somebody switches to *this.
  void switch_to(Context& next);

 private:
  void begin_sanitized();
  void jump_to(Context& next);

  // ThreadSanitizer follows a stack of calls for every context.
  void* sanitized_ = nullptr;  ///< null without it, and for an OS thread that has not switched yet
  bool is_own_sanitized_ = false;

#if defined(MOE_SIMT_BOOST_CONTEXT)
  struct Transfer;
  void* handle_ = nullptr;
#elif defined(MOE_SIMT_UCONTEXT)
  [[noreturn]] void enter();
  static void trampoline(unsigned low, unsigned high);

  jmp_buf registers_;
  std::byte* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  bool is_started_ = true;
#else
  static void begin(Context* self);

  void* stack_pointer_ = nullptr;  ///< place of the registers, while it does not run
#endif
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
};

/// Stacks of one size, mapped in slabs, each above a page that faults. Memory comes with use.
///
/// The stacks a pool hands out begin at different offsets in their page frames, so that the hot
/// ends of many stacks do not fall into the same cache sets.
class StackPool {
 public:
  explicit StackPool(size_t stack_bytes);
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  struct Stack {
    std::byte* base;
    size_t bytes;
  };
  /// @throws SystemError  no address space, or more mappings than the system allows.
  Stack take();

 private:
  struct Slab {
    std::byte* base;
    size_t bytes;
  };

  size_t stack_bytes_;
  size_t page_bytes_;
  std::vector<Slab> slabs_;
  int num_taken_ = 0;  ///< stacks taken of the last slab
};

}  // namespace moe::simt
