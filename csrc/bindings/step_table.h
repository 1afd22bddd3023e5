#pragma once
// fusedtrain._host.Gatherer: the tensors of an optimizer step as one table of StepTensor, and what the arguments of a
// call are as bytes.
//
// A list of tensors costs the dispatcher a quarter of a microsecond each, several times what the update of a small
// parameter takes, and Python as much for the sizes of one. Here they are read through DLPack's C functions, which
// torch.Tensor offers from DLPack 1.3 on.
#include <ATen/dlpack.h>  // DLPack's own header, a C interface
#include <pybind11/pybind11.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings/dense.h"
#include "optimizer_step.h"

#if DLPACK_MINOR_VERSION >= 3
namespace py = pybind11;

namespace fusedtrain::bindings {
namespace {

bool is_byte(DLDataType type) { return type.lanes == 1 && type.code == kDLUInt && type.bits == 8; }

std::optional<DType> dtype_of(DLDataType type) {
  if (type.lanes != 1) return {};
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code != kDLFloat) return {};
  return type.bits == 32   ? std::optional(DType::kFloat32)
         : type.bits == 16 ? std::optional(DType::kFloat16)
         : type.bits == 64 ? std::optional(DType::kFloat64)
                           : std::nullopt;
}

int64_t numel_of(const DLTensor& t) {
  int64_t numel = 1;
  for (int d = 0; d < t.ndim; ++d) numel *= t.shape[d];
  return numel;
}

bool is_dense(const DLTensor& t, int64_t numel) { return bindings::fills_memory(t.ndim, numel, t.shape, t.strides); }

// The shape and, where they matter, the strides of `p`.
bool is_laid_out_like(const DLTensor& t, const DLTensor& p, int64_t numel) {
  if (t.ndim != p.ndim) return false;
  for (int d = 0; d < p.ndim; ++d) {
    if (t.shape[d] != p.shape[d] || (numel > 0 && p.shape[d] > 1 && t.strides[d] != p.strides[d])) return false;
  }
  return true;
}

class Gatherer {
 public:
  // `tensor` is torch.Tensor, `parameter` torch.nn.Parameter: subclasses may mean something else by their data.
  Gatherer(const py::object& tensor, const py::object& parameter)
      : tensor_(reinterpret_cast<PyTypeObject*>(tensor.ptr())),
        parameter_(reinterpret_cast<PyTypeObject*>(parameter.ptr())) {
    const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    api_ = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api_ == nullptr) throw py::error_already_set();
    if (api_->header.version.major != DLPACK_MAJOR_VERSION) throw py::value_error("another version of DLPack");
  }

  // What belongs to each parameter, by its name in the parameter's state.
  struct Names {
    py::tuple states, scalars;
    py::object step;  // None, a name, or one tensor for all parameters
    bool narrow;      // states may be in other types than their parameter
    bool ema;
    py::object exact;  // None or a name: of parameters in 16 bits
    bool exact_is_float;
  };
  py::object gather(const py::list& params, const py::dict& state, const Names& names) const;
  py::object describe(const py::tuple& args, bool grads) const;

 private:
  // False unless it is a tensor on the CPU or a CUDA device: on that of `like`, where there is one.
  bool read(PyObject* object, const DLTensor* like, DLTensor* out) const {
    if (object == nullptr || (Py_TYPE(object) != tensor_ && Py_TYPE(object) != parameter_)) return false;
    if (api_->dltensor_from_py_object_no_sync(object, out) != 0) {
      PyErr_Clear();
      return false;
    }
    const DLDevice device = out->device;
    if (like != nullptr) {
      return device.device_type == like->device.device_type && device.device_id == like->device.device_id;
    }
    return device.device_type == kDLCPU || device.device_type == kDLCUDA;
  }
  // The data of a tensor like `p`, or nothing.
  std::optional<void*> like(PyObject* object, const DLTensor& p, int64_t numel, DType dtype) const {
    DLTensor t;
    if (!read(object, &p, &t) || dtype_of(t.dtype) != dtype || !is_laid_out_like(t, p, numel)) return {};
    return static_cast<char*>(t.data) + t.byte_offset;
  }
  // The states of one parameter, all stored alike; false where they are not what the kernels take.
  bool fill_states(StepTensor* row, const DLTensor& p, PyObject* own, const Names& names) const;
  // The numbers in a tensor of `count` floats on the device of `p`, or null.
  float* numbers(PyObject* object, const DLTensor& p, int64_t count) const {
    DLTensor t;
    if (!read(object, &p, &t) || dtype_of(t.dtype) != DType::kFloat32 || numel_of(t) != count || !is_dense(t, count)) {
      return nullptr;
    }
    return reinterpret_cast<float*>(static_cast<char*>(t.data) + t.byte_offset);
  }
  float* number(PyObject* object, const DLTensor& p) const { return numbers(object, p, 1); }
  // `p` is the parameter, `grad` and `own` what belongs to it.
  bool fill(StepTensor* row, const DLTensor& p, PyObject* grad, PyObject* own, const Names& names) const;

  // Appends what `object` is; false where that is more than its bytes say.
  bool append(std::string* to, PyObject* object, bool grads) const;

  PyTypeObject *tensor_, *parameter_;
  const DLPackExchangeAPI* api_;
  py::str grad_{"grad"}, ema_{"ema"}, is_neg_{"is_neg"}, scale_{"_scale"}, requires_grad_{"requires_grad"};
};

bool Gatherer::fill_states(StepTensor* row, const DLTensor& p, PyObject* own, const Names& names) const {
  const auto value = [own](const py::handle& name) { return PyDict_GetItemWithError(own, name.ptr()); };
  for (size_t k = 0; k < names.states.size(); ++k) {
    PyObject* state = value(names.states[k]);
    DLTensor t;
    if (!read(state, &p, &t)) return false;
    const bool coded = is_byte(t.dtype);
    const std::optional<DType> dtype = dtype_of(t.dtype);
    if (k == 0) row->state_dtype = dtype.value_or(row->dtype);
    const bool same_bits = dtype == row->dtype;
    const bool may_differ = names.narrow && row->dtype != DType::kFloat64;
    const bool narrow = may_differ && (dtype == DType::kFloat32 || dtype == DType::kBFloat16);
    const bool taken = coded ? may_differ : (same_bits || narrow) && dtype == row->state_dtype;
    if (!taken || !is_laid_out_like(t, p, row->numel) || (k > 0 && coded != is_coded(*row))) return false;
    if (coded) {
      row->scales[k] = numbers(value(py::object(names.states[k]) + scale_), p, code_blocks(row->numel));
      if (row->scales[k] == nullptr) return false;
    }
    row->states[k] = static_cast<char*>(t.data) + t.byte_offset;
  }
  return true;
}

bool Gatherer::fill(StepTensor* row, const DLTensor& p, PyObject* grad, PyObject* own, const Names& names) const {
  const std::optional<DType> dtype = dtype_of(p.dtype);
  const int64_t numel = numel_of(p);
  if (!dtype || !is_dense(p, numel)) return false;
  *row = {.numel = numel,
          .dtype = *dtype,
          .param = static_cast<char*>(p.data) + p.byte_offset,
          .grad = nullptr,
          .states = {},
          .scalars = {},
          .ema = nullptr,
          .step = nullptr,
          .state_dtype = *dtype,
          .scales = {},
          .exact = nullptr};
  const auto assign = [&](void*& to, PyObject* object, DType wanted) {
    const std::optional<void*> data = like(object, p, numel, wanted);
    if (data) to = *data;
    return data.has_value();
  };
  if (!assign(row->grad, grad, *dtype)) return false;
  const bool own_step = PyUnicode_Check(names.step.ptr());
  if (!own_step && !names.step.is_none() && (row->step = number(names.step.ptr(), p)) == nullptr) return false;
  const bool with_exact = !names.exact.is_none() && (dtype == DType::kBFloat16 || dtype == DType::kFloat16);
  if (names.states.empty() && !own_step && !names.ema && !with_exact) return true;
  if (own == nullptr || !PyDict_Check(own)) return false;
  const auto value = [own](const py::handle& name) { return PyDict_GetItemWithError(own, name.ptr()); };
  if (!fill_states(row, p, own, names)) return false;
  for (size_t k = 0; k < names.scalars.size(); ++k) {
    if ((row->scalars[k] = number(value(names.scalars[k]), p)) == nullptr) return false;
  }
  const DType acc = *dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (names.ema && !assign(row->ema, value(ema_), acc)) return false;
  const DType exact = names.exact_is_float ? DType::kFloat32 : *dtype;
  if (with_exact && !assign(row->exact, value(names.exact), exact)) return false;
  return !own_step || (row->step = number(value(names.step), p)) != nullptr;
}

py::object Gatherer::gather(const py::list& params, const py::dict& state, const Names& names) const {
  py::list with_grad, grads;
  std::vector<StepTensor> rows;
  rows.reserve(params.size());
  DLTensor first, p;
  for (const py::handle param : params) {
    const py::object grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param.ptr(), grad_.ptr()));
    if (!grad) throw py::error_already_set();
    if (grad.is_none()) continue;
    PyObject* own = PyDict_GetItemWithError(state.ptr(), param.ptr());
    rows.emplace_back();
    const bool is_first = rows.size() == 1;
    bool taken = read(param.ptr(), is_first ? nullptr : &first, &p);
    if (is_first) first = p;
    taken = taken && fill(&rows.back(), p, grad.ptr(), own, names);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    // DLPack does not tell views that are to be read with the other sign; autograd makes such of single numbers only.
    if (!taken || (rows.back().numel == 1 && grad.attr(is_neg_)().cast<bool>())) return py::none();
    with_grad.append(param);
    grads.append(grad);
  }
  return py::make_tuple(py::bytearray(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(StepTensor)),
                        with_grad, grads);
}

// Each begins with what it is, and where it may have several lengths, with its own: no two descriptions are alike.
bool Gatherer::append(std::string* to, PyObject* object, bool grads) const {
  const auto add = [to](char kind, const auto&... values) {
    to->push_back(kind);
    (to->append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  };
  if (object == Py_None) return add('n'), true;
  if (PyBool_Check(object)) return add('b', char(object == Py_True)), true;
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return add('i', value), overflow == 0;
  }
  if (PyFloat_CheckExact(object)) return add('f', PyFloat_AS_DOUBLE(object)), true;
  if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) return PyErr_Clear(), false;
    return add('s', size), to->append(text, size), true;
  }
  if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    add(PyTuple_CheckExact(object) ? 't' : 'l', size);
    for (Py_ssize_t k = 0; k < size; ++k) {
      if (!append(to, PySequence_Fast_GET_ITEM(object, k), grads)) return false;
    }
    return true;
  }
  DLTensor t;
  if (!read(object, nullptr, &t)) return false;
  // One number, or whole ones, may stand for an option: their values would count.
  if (numel_of(t) == 1 || (t.dtype.code != kDLFloat && t.dtype.code != kDLBfloat)) return false;
  bool recorded = false;
  if (grads) {
    const py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, requires_grad_.ptr()));
    if (!value) return PyErr_Clear(), false;
    recorded = value.ptr() == Py_True;
  }
  add('T', recorded, t.device.device_type, t.device.device_id, t.dtype.code, t.dtype.bits, t.dtype.lanes, t.ndim);
  to->append(reinterpret_cast<const char*>(t.shape), t.ndim * sizeof(int64_t));
  to->append(reinterpret_cast<const char*>(t.strides), t.ndim * sizeof(int64_t));
  return true;
}

py::object Gatherer::describe(const py::tuple& args, bool grads) const {
  std::string description;
  description.reserve(512);
  for (const py::handle arg : args) {
    if (!append(&description, arg.ptr(), grads)) return py::none();
  }
  return py::bytes(description);
}

void bind_step_table(py::module_& m) {
  py::class_<Gatherer>(m, "Gatherer", "Reads the tensors of an optimizer step without the dispatcher.")
      .def(py::init<const py::object&, const py::object&>(), py::arg("tensor"), py::arg("parameter"))
      .def(
          "gather",
          [](const Gatherer& self, const py::list& params, const py::dict& state, py::tuple states, py::tuple scalars,
             py::object step, bool narrow, bool ema, py::object exact, bool exact_is_float) {
            if (states.size() > kMaxStates || scalars.size() > kMaxScalars) throw py::value_error("too many states");
            return self.gather(params, state,
                               {std::move(states), std::move(scalars), std::move(step), narrow, ema, std::move(exact),
                                exact_is_float});
          },
          py::arg("params"), py::arg("state"), py::arg("states"), py::arg("scalars"), py::arg("step"),
          py::arg("narrow"), py::arg("ema"), py::arg("exact"), py::arg("exact_is_float"),
          "Returns (table, params, grads) of the parameters that have a gradient, or None where a tensor is missing, "
          "a subclass, not dense, not on the CPU or the CUDA device of the first, or unlike its parameter.")
      .def("describe", &Gatherer::describe, py::arg("args"), py::arg("grads"),
           "Returns device, dtype, shape and strides of tensors, with `grads` whether they require a gradient, and the "
           "values of numbers, texts and tuples or lists of such, as bytes; None where there is anything else, or a "
           "tensor of a subclass, of one number or whole ones, or of another device than CPU and CUDA.");
}

}  // namespace
}  // namespace fusedtrain::bindings
#endif
