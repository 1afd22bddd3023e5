#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace fusedtrain::bindings {

// Working memory of one thread, aligned to a cache line.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(::operator new(size_t(bytes), std::align_val_t(64))) {}
  void* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace fusedtrain::bindings
