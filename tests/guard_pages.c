// Preloaded into a process: what is asked for with an alignment, as tensors and the kernels' workspaces are, ends where
// a protected page begins, or begins where one ends. Freed memory is protected for good.
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

extern void __libc_free(void*);

int guard_at_end = 1;

#define PAGE ((uintptr_t)4096)
#define RESERVED ((uintptr_t)1 << 42)
#define TENSOR_ALIGNMENT 64  // torch's; one of them ends with its last element all the same

static _Atomic(uintptr_t) reserved, next;

static void* reserve(void* at, size_t bytes, int flags) {
  void* p = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

__attribute__((constructor)) static void begin(void) {
  next = (uintptr_t)reserve(NULL, RESERVED, 0) + PAGE;
  reserved = next - PAGE;
}

static int is_guarded(uintptr_t address) { return reserved != 0 && address - reserved < RESERVED; }

// A page that holds the size, a protected one, the memory, a protected one. The memory asked for begins in its first
// page.
static void* guarded(size_t alignment, size_t size) {
  if (reserved == 0) return NULL;
  if (size == 0) size = 1;
  const size_t bytes = (size + PAGE - 1) / PAGE * PAGE;
  const uintptr_t head = atomic_fetch_add(&next, bytes + 3 * PAGE), memory = head + 2 * PAGE;
  if (mprotect((void*)head, PAGE, PROT_READ | PROT_WRITE) != 0) abort();
  if (mprotect((void*)memory, bytes, PROT_READ | PROT_WRITE) != 0) abort();
  *(size_t*)head = bytes;
  return (void*)(guard_at_end ? (memory + bytes - size) / alignment * alignment : memory);
}

int posix_memalign(void** p, size_t alignment, size_t size) {
  *p = guarded(alignment == TENSOR_ALIGNMENT ? 1 : alignment, size);
  return *p == NULL ? ENOMEM : 0;
}

void* aligned_alloc(size_t alignment, size_t size) { return guarded(alignment, size); }

void free(void* p) {
  if (!is_guarded((uintptr_t)p)) return __libc_free(p);
  const uintptr_t head = (uintptr_t)p / PAGE * PAGE - 2 * PAGE;
  reserve((void*)head, *(size_t*)head + 2 * PAGE, MAP_FIXED);
}
