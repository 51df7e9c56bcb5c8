// Fortified longjmp() refuses to jump to another stack.
#undef _FORTIFY_SOURCE

#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "core/error.h"
#include "core/process.h"

#if defined(MOE_SIMT_BOOST_CONTEXT)
#include <boost/context/detail/fcontext.hpp>
#elif defined(MOE_SIMT_UCONTEXT)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(MOE_SIMT_BOOST_CONTEXT) && !defined(MOE_SIMT_UCONTEXT)
// void moe_simt_switch(void** from, void* to): puts the registers that a call preserves (System V
// ABI, x86-64) onto the stack, leaves its pointer in *from and takes them from the stack `to`.
// Calls and returns stay in pairs, so that the processor predicts the returns.
// moe_simt_begin: where a new stack returns to; calls r13(r12).
asm(R"(
.pushsection .text
.p2align 4
.globl moe_simt_switch
.hidden moe_simt_switch
.type moe_simt_switch, @function
moe_simt_switch:
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
.size moe_simt_switch, . - moe_simt_switch
.globl moe_simt_begin
.hidden moe_simt_begin
.type moe_simt_begin, @function
moe_simt_begin:
  movq %r12, %rdi
  call *%r13
  ud2
.size moe_simt_begin, . - moe_simt_begin
.popsection
)");

extern "C" {
void moe_simt_switch(void** from, void* to);
void moe_simt_begin();
}
#endif

namespace moe::simt {

#if defined(__SANITIZE_THREAD__)

void Context::begin_sanitized() {
  sanitized_ = __tsan_create_fiber(0);
  is_own_sanitized_ = true;
}

Context::~Context() {
  if (is_own_sanitized_)
    __tsan_destroy_fiber(sanitized_);
}

void Context::switch_to(Context& next) {
  if (sanitized_ == nullptr)
    sanitized_ = __tsan_get_current_fiber();
  // Fibers of one OS thread come after each other.
  __tsan_switch_to_fiber(next.sanitized_, 0);
  jump_to(next);
}

#else

void Context::begin_sanitized() {}

Context::~Context() = default;

void Context::switch_to(Context& next) {
  jump_to(next);
}

#endif

#if defined(MOE_SIMT_BOOST_CONTEXT)

// The fiber that is switched to notes where the one that left goes on.
struct Context::Transfer {
  Context* left;
  Context* entered;

  static void note(const boost::context::detail::transfer_t& transfer) {
    static_cast<Transfer*>(transfer.data)->left->handle_ = transfer.fctx;
  }
  static void begin(boost::context::detail::transfer_t transfer) {
    note(transfer);
    const Context& self = *static_cast<Transfer*>(transfer.data)->entered;
    self.entry_(self.argument_);
  }
};

Context::Context(std::byte* stack, size_t stack_bytes, Entry entry, void* argument)
    : handle_(boost::context::detail::make_fcontext(
          stack + stack_bytes, stack_bytes, &Transfer::begin)),
      entry_(entry),
      argument_(argument) {
  begin_sanitized();
}

void Context::jump_to(Context& next) {
  Transfer transfer{this, &next};
  Transfer::note(boost::context::detail::jump_fcontext(next.handle_, &transfer));
}

#elif defined(MOE_SIMT_UCONTEXT)

Context::Context(std::byte* stack, size_t stack_bytes, Entry entry, void* argument)
    : stack_(stack),
      stack_bytes_(stack_bytes),
      is_started_(false),
      entry_(entry),
      argument_(argument) {
  begin_sanitized();
}

void Context::jump_to(Context& next) {
  if (_setjmp(registers_) == 0)
    next.enter();
}

void Context::enter() {
  if (is_started_)
    _longjmp(registers_, 1);
  is_started_ = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stack_;
  start.uc_stack.ss_size = stack_bytes_;
  start.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&start,
              reinterpret_cast<void (*)()>(&Context::trampoline),
              2,
              static_cast<unsigned>(self),
              static_cast<unsigned>(static_cast<uint64_t>(self) >> 32));
  setcontext(&start);
  throw SystemError("setcontext failed", errno);
}

void Context::trampoline(unsigned low, unsigned high) {
  const auto self =
      reinterpret_cast<Context*>(static_cast<uintptr_t>(static_cast<uint64_t>(high) << 32 | low));
  self->entry_(self->argument_);
}

#else

Context::Context(std::byte* stack, size_t stack_bytes, Entry entry, void* argument)
    : entry_(entry), argument_(argument) {
  // From the stack pointer upwards: r15, r14, r13, r12, rbx, rbp, where to return to. The pointer
  // is a multiple of 16 then, as before any call.
  constexpr int kNumWords = 7;
  auto** const words = reinterpret_cast<void**>(stack + stack_bytes) - kNumWords;
  std::fill_n(words, kNumWords, nullptr);
  words[2] = reinterpret_cast<void*>(&Context::begin);
  words[3] = this;
  words[6] = reinterpret_cast<void*>(&moe_simt_begin);
  stack_pointer_ = words;
  begin_sanitized();
}

void Context::begin(Context* self) {
  self->entry_(self->argument_);
}

void Context::jump_to(Context& next) {
  moe_simt_switch(&stack_pointer_, next.stack_pointer_);
}

#endif

namespace {

constexpr int kStacksPerSlab = 64;
constexpr int kNumColors = 32;
constexpr size_t kColorBytes = 128;

}  // namespace

StackPool::StackPool(size_t stack_bytes)
    : stack_bytes_(stack_bytes), page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  MOE_CHECK(stack_bytes % page_bytes_ == 0 && stack_bytes >= 4 * page_bytes_,
            "a stack of ",
            stack_bytes,
            " bytes is not at least 4 whole pages of ",
            page_bytes_);
}

StackPool::~StackPool() {
  for (const Slab& slab : slabs_)
    munmap(slab.base, slab.bytes);
}

StackPool::Stack StackPool::take() {
  const size_t stride = stack_bytes_ + page_bytes_;
  if (slabs_.empty() || num_taken_ == kStacksPerSlab) {
    const size_t bytes = stride * kStacksPerSlab;
    void* const base = mmap(
        nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (base == MAP_FAILED)
      throw SystemError(concat("no address space for ",
                               kStacksPerSlab,
                               " stacks of emulated ",
                               "threads, ",
                               bytes,
                               " bytes",
                               describe_address_space()),
                        errno);
    slabs_.push_back({static_cast<std::byte*>(base), bytes});
    num_taken_ = 0;
  }
  // Stacks grow downwards, into the page that stays inaccessible.
  std::byte* const base =
      slabs_.back().base + static_cast<size_t>(num_taken_) * stride + page_bytes_;
  if (mprotect(base, stack_bytes_, PROT_READ | PROT_WRITE) != 0)
    throw SystemError(concat("cannot make ", stack_bytes_, " bytes of stack accessible"), errno);
  const size_t color = static_cast<size_t>(num_taken_ % kNumColors) * kColorBytes;
  ++num_taken_;
  return {base, stack_bytes_ - color};
}

}  // namespace moe::simt
