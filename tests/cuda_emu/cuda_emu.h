#pragma once
// Runs CUDA kernels on the CPU: the same .cu file, compiled by g++ or clang++ with this folder on the include path, and
// linked with cuda_emu.cpp.
//
// Every CUDA thread of a block is a fiber; blocks run one after another. A fiber runs until it meets a barrier or a
// warp operation, so the order in which the threads of a block run is known, and chosen by CUDA_EMU_ORDER: "fwd" (the
// default), "rev", or a number that seeds a shuffle of it. A missing barrier shows as a difference between orders.
//
// A mistake that is undefined on a GPU ends the process with a message: threads at different barriers, lanes of one
// warp operation that disagree on it, a shuffle from a lane that is not there. Dynamic shared memory begins as NaN in
// every block and has its own allocation, so that -fsanitize=address sees its bounds.
//
// Not covered: speed, registers, PTX, tensor cores, clusters, atomics, the rounding of approximate functions, and
// memory ordering between threads beyond barriers. This checks a kernel's logic; it is no substitute for a run on a
// GPU.
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

namespace cuda_emu {

constexpr int kWarp = 32;

enum class WarpOp { kSync, kShuffle, kVote };

// What kernels see of their thread and their block, and bring to a warp operation.
struct Thread {
  uint3 index;
  int rank;
  WarpOp op;
  unsigned mask;
  int source;              // lane to read, of a shuffle
  uint64_t in[2], out[2];  // what it brings, and takes
  unsigned votes;          // lanes whose predicate holds
};
struct Block {
  uint3 index;
  dim3 threads, blocks;
  void* shared;
};

// constinit spares every access the question whether they were initialised.
extern thread_local constinit Block* block;
extern thread_local constinit Thread* thread;
extern thread_local constinit cudaError_t last_error;

void warp_operation(WarpOp op, unsigned mask);
void barrier(const char* file, int line);  // where it stands

inline void* dynamic_shared_memory() { return block->shared; }
inline int lane() { return thread->rank % kWarp; }

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(thread->in) && std::is_trivially_copyable_v<T>);
  std::memcpy(thread->in, &value, sizeof(T));
  thread->source = source;
  warp_operation(WarpOp::kShuffle, mask);
  std::memcpy(&value, thread->out, sizeof(T));
  return value;
}

inline unsigned vote(unsigned mask, bool predicate) {
  thread->in[0] = predicate;
  warp_operation(WarpOp::kVote, mask);
  return thread->votes;
}

// Every thread of the grid calls kernel(arguments).
void run_grid(dim3 grid, dim3 threads_of_block, size_t shared_bytes, void (*kernel)(void*), void* arguments);

// kernel<<<grid, threads, shared_bytes, stream>>>(args...), finished on return.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 threads_of_block, size_t shared_bytes, void* /*stream*/, A... args) {
  std::pair call{kernel, std::tuple<P...>(args...)};
  using Call = decltype(call);
  const auto run = [](void* c) { std::apply(static_cast<Call*>(c)->first, static_cast<Call*>(c)->second); };
  run_grid(grid, threads_of_block, shared_bytes, run, &call);
}

}  // namespace cuda_emu
