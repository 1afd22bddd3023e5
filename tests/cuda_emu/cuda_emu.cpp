// The scheduler of cuda_emu.h: fibers, barriers, warp operations and blocks.
#include "cuda_emu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_emu {

thread_local constinit Block* block = nullptr;
thread_local constinit Thread* thread = nullptr;
thread_local constinit cudaError_t last_error = cudaSuccess;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 64 << 10;  // what every GPU gives a block that asks, as launch does

// --- fibers --------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Pushes the callee-saved registers, stores the stack pointer in *from, and does the reverse with `to`.
extern "C" void cuda_emu_switch(void** from, void* to);
asm(R"(
.text
.weak cuda_emu_switch
.type cuda_emu_switch, @function
cuda_emu_switch:
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
.size cuda_emu_switch, .-cuda_emu_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void start(char* stack, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(stack + kStackBytes);  // a multiple of 16
    *--top = nullptr;  // where entry would return to; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }
  static void swap(Context& from, Context& to) { cuda_emu_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
  ucontext_t context;

  void start(char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

// Address sanitizer keeps track of stacks; it must be told before and after every switch.
struct StackSwitch {
#if defined(__SANITIZE_ADDRESS__)
  static void before(void** own, const void* bottom, size_t size) { __sanitizer_start_switch_fiber(own, bottom, size); }
  static void after(void* own, const void** bottom, size_t* size) {
    __sanitizer_finish_switch_fiber(own, bottom, size);
  }
#else
  static void before(void**, const void*, size_t) {}
  static void after(void*, const void**, size_t*) {}
#endif
};

// --- state ---------------------------------------------------------------------------------------------------------

enum class State { kRunning, kAtBarrier, kAtWarp, kDone };

struct Fiber : Thread {
  State state;
  const char* barrier_file;  // where it waits
  int barrier_line;

  Context context;
  std::unique_ptr<char, void (*)(void*)> stack{nullptr, std::free};
  void* fake_stack = nullptr;
};

struct RunningBlock : Block {
  void (*kernel)(void*) = nullptr;
  void* arguments = nullptr;
  Context scheduler;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
};

thread_local std::vector<std::unique_ptr<Fiber>> fibers;  // reused by all blocks

RunningBlock& running_block() { return static_cast<RunningBlock&>(*block); }
Fiber& running_fiber() { return static_cast<Fiber&>(*thread); }

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "cuda_emu: block (%u, %u, %u), thread %d: %s\n", block->index.x, block->index.y, block->index.z,
               thread != nullptr ? thread->rank : -1, message.c_str());
  std::abort();
}

// --- switching -----------------------------------------------------------------------------------------------------

// From the scheduler to a thread; returns when that waits or ends.
void resume(Fiber& f) {
  RunningBlock& b = running_block();
  thread = &f;
  StackSwitch::before(&b.fake_stack, f.stack.get(), kStackBytes);
  Context::swap(b.scheduler, f.context);
  StackSwitch::after(b.fake_stack, nullptr, nullptr);
  thread = nullptr;
}

// From the running thread to the scheduler.
void wait(State state) {
  RunningBlock& b = running_block();
  Fiber& f = running_fiber();
  f.state = state;
  StackSwitch::before(state == State::kDone ? nullptr : &f.fake_stack, b.stack_bottom, b.stack_size);
  Context::swap(f.context, b.scheduler);
  StackSwitch::after(f.fake_stack, &b.stack_bottom, &b.stack_size);
}

void fiber_main() {
  RunningBlock& b = running_block();
  StackSwitch::after(nullptr, &b.stack_bottom, &b.stack_size);
  b.kernel(b.arguments);
  wait(State::kDone);
}

// --- the scheduler -------------------------------------------------------------------------------------------------

// The lanes that a waiting lane needs, or 0 while one of them is on its way. Lanes that have ended are not waited for.
unsigned lanes_at_warp_operation(int first, int count, Fiber& t) {
  unsigned present = 0;
  for (int l = 0; l < count; ++l) {
    Fiber& other = *fibers[first + l];
    if ((t.mask >> l & 1) == 0 || other.state == State::kDone) continue;
    if (other.state != State::kAtWarp) return 0;
    thread = &other;
    if (other.mask != t.mask || other.op != t.op) fail("lanes of one warp operation disagree on the mask or operation");
    present |= 1u << l;
  }
  thread = nullptr;
  return present;
}

void complete_warp_operation(int first, unsigned present) {
  unsigned votes = 0;
  for (int l = 0; l < kWarp; ++l) {
    if (present >> l & 1 && fibers[first + l]->in[0] != 0) votes |= 1u << l;
  }
  for (int l = 0; l < kWarp; ++l) {
    if ((present >> l & 1) == 0) continue;
    Fiber& t = *fibers[first + l];
    thread = &t;
    if (t.op == WarpOp::kShuffle) {
      if ((present >> t.source & 1) == 0)
        fail("shuffle from lane " + std::to_string(t.source) + ", which is not there");
      std::copy_n(fibers[first + t.source]->in, 2, t.out);
    }
    t.votes = votes;
    t.state = State::kRunning;
  }
  thread = nullptr;
}

bool complete_warp_operations(int count) {
  bool any = false;
  for (int first = 0; first < count; first += kWarp) {
    const int lanes = std::min(kWarp, count - first);
    for (int l = 0; l < lanes; ++l) {
      Fiber& t = *fibers[first + l];
      if (t.state != State::kAtWarp) continue;
      const unsigned present = lanes_at_warp_operation(first, lanes, t);
      if (present == 0) continue;
      complete_warp_operation(first, present);
      any = true;
    }
  }
  return any;
}

// All threads that have not ended wait: lets them pass if they are at the same barrier.
void complete_barrier(int count) {
  const Fiber* first = nullptr;
  for (int i = 0; i < count; ++i) {
    Fiber& t = *fibers[i];
    if (t.state == State::kDone) continue;
    thread = &t;
    if (t.state == State::kAtWarp) fail("deadlock: a warp operation waits for lanes that are at a barrier");
    if (first == nullptr) first = &t;
    const bool same = std::strcmp(t.barrier_file, first->barrier_file) == 0 && t.barrier_line == first->barrier_line;
    if (!same) {
      fail("divergent barrier: line " + std::to_string(t.barrier_line) + ", thread " + std::to_string(first->rank) +
           " is at line " + std::to_string(first->barrier_line));
    }
    t.state = State::kRunning;
  }
  thread = nullptr;
}

void run_block(const std::vector<int>& order) {
  const int count = static_cast<int>(order.size());
  for (int i = 0; i < count; ++i) {
    Fiber& t = *fibers[i];
    const unsigned x = block->threads.x, y = block->threads.y;
    t.index = {i % x, i / x % y, i / (x * y)};
    t.rank = i;
    t.state = State::kRunning;
    t.context.start(t.stack.get(), fiber_main);
  }
  for (;;) {
    bool any = false;
    for (int i : order) {
      if (fibers[i]->state != State::kRunning) continue;
      any = true;
      resume(*fibers[i]);
    }
    if (!any) return;
    if (!complete_warp_operations(count)) complete_barrier(count);
  }
}

std::vector<int> thread_order(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  const char* wanted = std::getenv("CUDA_EMU_ORDER");
  const std::string name = wanted != nullptr ? wanted : "fwd";
  if (name == "rev") {
    std::reverse(order.begin(), order.end());
  } else if (name != "fwd") {
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(std::stoul(name))));
  }
  return order;
}

cudaError_t check_launch(dim3 grid, dim3 threads_of_block, size_t shared_bytes) {
  const uint64_t count = uint64_t{threads_of_block.x} * threads_of_block.y * threads_of_block.z;
  const bool grid_fits = grid.x - 1 < 0x7fffffffu && grid.y - 1 < 65535u && grid.z - 1 < 65535u;
  const bool block_fits = count >= 1 && count <= 1024 && threads_of_block.z <= 64;
  if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
  return shared_bytes > kSharedBytes ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

void warp_operation(WarpOp op, unsigned mask) {
  if ((mask >> lane() & 1) == 0) fail("warp operation by a lane that is not in its mask");
  thread->op = op;
  thread->mask = mask;
  wait(State::kAtWarp);
}

void barrier(const char* file, int line) {
  running_fiber().barrier_file = file;
  running_fiber().barrier_line = line;
  wait(State::kAtBarrier);
}

void run_grid(dim3 grid, dim3 threads_of_block, size_t shared_bytes, void (*kernel)(void*), void* arguments) {
  last_error = check_launch(grid, threads_of_block, shared_bytes);
  if (last_error != cudaSuccess) return;
  RunningBlock b;
  b.threads = threads_of_block;
  b.blocks = grid;
  b.kernel = kernel;
  b.arguments = arguments;
  const std::vector<int> order = thread_order(static_cast<int>(b.threads.x * b.threads.y * b.threads.z));
  while (fibers.size() < order.size()) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.reset(static_cast<char*>(std::aligned_alloc(64, kStackBytes)));
  }
  block = &b;
  for (b.index.z = 0; b.index.z < grid.z; ++b.index.z) {
    for (b.index.y = 0; b.index.y < grid.y; ++b.index.y) {
      for (b.index.x = 0; b.index.x < grid.x; ++b.index.x) {
        std::unique_ptr<char[]> shared(new char[shared_bytes]);  // exactly as large as asked for
        std::memset(shared.get(), 0xff, shared_bytes);           // NaN
        b.shared = shared.get();
        run_block(order);
      }
    }
  }
  block = nullptr;
}

}  // namespace cuda_emu
