#include "bindings/common.h"

#include <dlfcn.h>

extern "C" const char* cudaGetErrorString(int error);  // of the runtime that the CUDA kernels are linked with

namespace fusedtrain::bindings {

CudaLaunch::CudaLaunch(const char* op, const Tensor& t) : op_(op), guard_(t.get_device_index()) {
  using GetStream = int32_t (*)(int32_t device, void** stream);
  static const auto get_stream = []() -> GetStream {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    return torch_cuda ? reinterpret_cast<GetStream>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(get_stream != nullptr, "fusedtrain: ", op, " on CUDA needs a torch with CUDA");
  STD_TORCH_CHECK(get_stream(t.get_device(), &stream) == 0, "fusedtrain: ", op, " found no current CUDA stream");
}

void CudaLaunch::operator()(int error) const {
  if constexpr (kWithCuda) {
    STD_TORCH_CHECK(error == 0, "fusedtrain: launching ", op_, " failed with CUDA error ", error, ": ",
                    cudaGetErrorString(error), ". It may be of a kernel before: CUDA_LAUNCH_BLOCKING=1 tells");
  }
}

}  // namespace fusedtrain::bindings
