/* The whole of a small call in one C++ function: checks, lookup, allocation, launches and, where a gradient will be
   wanted, the node of the graph.

   A call is described by words: what its tensors look like, how their addresses are aligned, and the value of every
   number. The first calls of a description run in Python; what they allocate and launch is noted there and handed over
   as a plan. From then on the same description repeats the plan. Whatever is unusual (subclasses, other layouts, modes,
   transforms) has no plan and goes to Python.

   A public function in front of a primitive fills in defaults and scales; what it made of a call is remembered too, so
   that the same call goes from its own arguments to the plan. */
#include <Python.h>
#include <dlfcn.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function); /* shared until PyTorch 2.12, intrusive after */

constexpr int MAX_WORDS = 160, MAX_PARAMS = 66, MAX_TENSORS = 48;
constexpr uint64_t TENSOR = 1, FLOAT = 2, INTEGER = 3, TRUTH = 4, TEXT = 5, NOTHING = 6, TWIN = 7, PAIR = 8;
constexpr int64_t SCRATCH_STEP = 256, KEPT_BYTES = 2 << 20; /* more is the allocator's: such calls take the device long */
constexpr size_t KEPT_STREAMS = 16;

/* --- the driver ---------------------------------------------------------------------------------------------------*/

struct Handle { /* as launcher.c makes them */
  void *function, *context;
  unsigned threads, shared;
  int cooperative;
};
using Launch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                       void **);
using CooperativeLaunch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                                  void **);
Launch launch_kernel;
CooperativeLaunch launch_cooperative;
int (*context_current)(void **);
int (*context_push)(void *);
int (*context_pop)(void **);
int (*error_text)(int, const char **);
int (*stream_number)(void *, unsigned long long *); /* of its own, never given twice; none before CUDA 12 */
int (*stream_captured)(void *, int *);
int (*stream_of)(int32_t, void **); /* PyTorch's own C function; none in a build without CUDA */
int (*start_plan)(void *, const uint64_t *, int, void *); /* launcher.c's: tensor maps, and launches that start early */

void open_driver() {
  if (launch_kernel) return;
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!driver) throw std::runtime_error("libcuda.so.1 cannot be opened: no NVIDIA driver on this machine");
  context_current = reinterpret_cast<int (*)(void **)>(dlsym(driver, "cuCtxGetCurrent"));
  context_push = reinterpret_cast<int (*)(void *)>(dlsym(driver, "cuCtxPushCurrent_v2"));
  context_pop = reinterpret_cast<int (*)(void **)>(dlsym(driver, "cuCtxPopCurrent_v2"));
  error_text = reinterpret_cast<int (*)(int, const char **)>(dlsym(driver, "cuGetErrorString"));
  launch_cooperative = reinterpret_cast<CooperativeLaunch>(dlsym(driver, "cuLaunchCooperativeKernel"));
  stream_number = reinterpret_cast<int (*)(void *, unsigned long long *)>(dlsym(driver, "cuStreamGetId"));
  stream_captured = reinterpret_cast<int (*)(void *, int *)>(dlsym(driver, "cuStreamIsCapturing"));
  auto found = reinterpret_cast<Launch>(dlsym(driver, "cuLaunchKernel"));
  if (!found || !context_current || !context_push || !context_pop || !error_text || !launch_cooperative)
    throw std::runtime_error("the NVIDIA driver lacks a function that launches need");
  if (void *cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
    stream_of = reinterpret_cast<int (*)(int32_t, void **)>(dlsym(cuda, "aoti_torch_get_current_cuda_stream"));
  launch_kernel = found;
}

void *current_stream(int device) {
  void *stream = nullptr;
  if (device >= 0 && (!stream_of || stream_of(device, &stream)))
    throw std::runtime_error("PyTorch does not tell the current stream");
  return stream;
}

/* --- descriptions and plans ---------------------------------------------------------------------------------------*/

struct Words {
  uint64_t word[MAX_WORDS];
  int num = 0;
  bool ok = true;
  void add(uint64_t value) {
    if (num < MAX_WORDS) word[num++] = value;
    else ok = false;
  }
  uint64_t hash() const {
    uint64_t h = 1469598103934665603ull;
    for (int i = 0; i < num; i++) h = (h ^ word[i]) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
    return h;
  }
};

/* False for what only Python may handle. */
bool describe(Words &words, const Tensor &t, bool recorded) {
  auto *impl = t.unsafeGetTensorImpl();
  if (t.layout() != at::kStrided) return false;
  auto sizes = impl->sizes();
  bool dense = impl->is_contiguous();
  uint64_t flags = TENSOR | uint64_t(dense) << 5 | uint64_t(recorded && t.requires_grad()) << 4 | uint64_t(t.scalar_type()) << 8 |
                   uint64_t(uint8_t(t.device().index())) << 16 | uint64_t(uint8_t(t.device().type())) << 24 |
                   uint64_t(sizes.size()) << 32;
  flags |= (reinterpret_cast<uint64_t>(t.const_data_ptr()) & 15) << 48;
  words.add(flags);
  words.add(impl->key_set().raw_repr());
  for (auto size : sizes) words.add(uint64_t(size));
  if (!dense)
    for (auto stride : impl->strides()) words.add(uint64_t(stride));
  return words.ok;
}

/* Which of the tensors before it starts at the same address: a plan cannot tell such tensors apart. */
void describe_twins(Words &words, const Tensor *tensors, int num, const Tensor &t) {
  const void *address = t.const_data_ptr();
  for (int i = 0; address && i < num; i++)
    if (tensors[i].defined() && tensors[i].const_data_ptr() == address) {
      words.add(TWIN | uint64_t(i) << 8);
      return;
    }
}

struct Param {
  int source; /* -1: the value itself; else a tensor, by its place among arguments and allocations */
  uint64_t value; /* or the offset into that tensor in bytes */
};
struct View { /* of a tensor by its place: what a product reads */
  int place;
  int64_t offset; /* in bytes */
  std::vector<int64_t> sizes, strides;
};
struct Step {
  Handle *handle; /* or launcher.c's own plan, where x is THROUGH; the place of a result, where it is PRODUCT */
  unsigned x, y;
  std::vector<Param> params;
  std::vector<View> views; /* of a product: its two factors, behind what is added if there is such */
};
constexpr unsigned THROUGH = ~0u, PRODUCT = ~1u;
struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
};
struct Table;
struct Plan {
  int device = -1, first = 0, num_shown = 0;
  int64_t id = 0;
  bool single = true, keeps = false, fills = false; /* fills: a gradient that is not there counts as zeros */
  std::vector<Allocation> allocations;
  std::vector<int64_t> scratch_at; /* of every allocation: where in scratch it lies, or -1: a tensor of its own */
  int64_t scratch_bytes = 0;
  std::vector<Step> steps;
  std::vector<int> outputs, saved; /* tensors by place; -1: none */
  std::shared_ptr<Table> backward;
};
using PlanPointer = std::shared_ptr<const Plan>;

struct Table {
  struct Entry {
    std::vector<uint64_t> words;
    PlanPointer plan; /* none: known to have no plan */
    std::vector<int> from; /* of a public function: which of its arguments the primitive's are, -1 for numbers */
  };
  std::shared_mutex mutex;
  std::unordered_multimap<uint64_t, Entry> entries;
  bool find(const Words &words, PlanPointer &plan, int *from = nullptr, int *num_from = nullptr) {
    std::shared_lock<std::shared_mutex> lock(mutex);
    auto range = entries.equal_range(words.hash());
    for (auto at = range.first; at != range.second; ++at) {
      auto &known = at->second.words;
      if (int(known.size()) == words.num && !std::memcmp(known.data(), words.word, 8 * size_t(words.num))) {
        plan = at->second.plan;
        if (from) {
          *num_from = int(at->second.from.size());
          std::memcpy(from, at->second.from.data(), sizeof(int) * at->second.from.size());
        }
        return true;
      }
    }
    return false;
  }
  void add(const Words &words, PlanPointer plan, std::vector<int> from = {}) {
    std::unique_lock<std::shared_mutex> lock(mutex);
    if (entries.size() >= 4096) entries.clear();
    entries.emplace(words.hash(), Entry{{words.word, words.word + words.num}, std::move(plan), std::move(from)});
  }
  void clear() {
    std::unique_lock<std::shared_mutex> lock(mutex);
    entries.clear();
  }
};

void refuse(int code) {
  if (!code) return;
  const char *text = nullptr;
  error_text(code, &text);
  throw std::runtime_error(std::string("cuLaunchKernel: ") + (text ? text : "unknown error"));
}

/* Scratch of a stream, kept: its calls run one after the other. Held while the launches of a call are handed over, since
   threads may share a stream. Never freed: the device may be gone when the process ends. */
struct Scratch {
  std::mutex mutex;
  Tensor memory;
};
std::shared_mutex scratch_mutex;
auto &scratches = *new std::unordered_map<uint64_t, std::unique_ptr<Scratch>>();

Scratch *scratch_of(const Plan &plan, void *stream) {
  unsigned long long number = 0;
  int captured = 0; /* a graph owns what is allocated while it is recorded, and may run beside this stream later */
  if (!plan.scratch_bytes || plan.scratch_bytes > KEPT_BYTES || !stream_number || !stream_captured) return nullptr;
  if (stream_captured(stream, &captured) || captured || stream_number(stream, &number)) return nullptr;
  uint64_t key = number * 64 + uint64_t(plan.device + 1);
  {
    std::shared_lock<std::shared_mutex> lock(scratch_mutex);
    auto found = scratches.find(key);
    if (found != scratches.end()) return found->second.get();
    if (scratches.size() >= KEPT_STREAMS) return nullptr;
  }
  std::unique_lock<std::shared_mutex> lock(scratch_mutex);
  auto &made = scratches[key];
  if (!made) made = std::make_unique<Scratch>();
  return made.get();
}

/* The allocator itself, where this device is the current one: the way through the dispatcher takes as long again. */
c10::Allocator *allocator_of(const Tensor &like) {
  auto device = like.device();
  if (device.type() == at::kCPU) return c10::GetAllocator(at::kCPU);
  if (device.type() != at::kCUDA) return nullptr;
  static const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  static c10::Allocator *const found = [] {
    try {
      return c10::GetAllocator(at::kCUDA);
    } catch (const c10::Error &) {
      return static_cast<c10::Allocator *>(nullptr);
    }
  }();
  return guard.getDevice().index() == device.index() ? found : nullptr;
}

Tensor allocated(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, const Tensor &like,
                 c10::Allocator *from) {
  if (from) {
    c10::DispatchKeySet keys(like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    return strides.empty() ? at::detail::empty_generic(sizes, from, keys, type, std::nullopt)
                           : at::detail::empty_strided_generic(sizes, strides, from, keys, type);
  }
  auto options = like.options().requires_grad(false).dtype(type);
  return strides.empty() ? at::empty(sizes, options) : at::empty_strided(sizes, strides, options);
}

Tensor seen(const Tensor *tensors, const View &view) {
  const Tensor &of = tensors[view.place];
  if (!view.offset && of.sizes() == at::IntArrayRef(view.sizes) && of.strides() == at::IntArrayRef(view.strides)) return of;
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(of.storage()), of.key_set(), of.dtype());
  auto *impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(of.storage_offset() + view.offset / int64_t(of.element_size()));
  impl->set_sizes_and_strides(view.sizes, view.strides);
  return made;
}

/* PyTorch's own product, below autograd: the node of the graph is ours. */
void multiply(const Step &step, Tensor *tensors) {
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor &out = tensors[reinterpret_cast<intptr_t>(step.handle)];
  auto &views = step.views;
  if (views.size() == 2) at::mm_out(out, seen(tensors, views[0]), seen(tensors, views[1]));
  else at::addmm_out(out, seen(tensors, views[0]), seen(tensors, views[1]), seen(tensors, views[2]));
}

/* Allocate and launch; tensors holds the arguments and is filled up with what was allocated. */
void repeat(const Plan &plan, Tensor *tensors, int num_arguments) {
  void *stream = current_stream(plan.device), *current = nullptr, *popped;
  const Tensor &like = tensors[plan.first];
  auto *from = allocator_of(like);
  auto *kept = scratch_of(plan, stream);
  std::unique_lock<std::mutex> held;
  uint64_t address[MAX_TENSORS], scratch = 0;
  if (kept) {
    held = std::unique_lock<std::mutex>(kept->mutex);
    if (!kept->memory.defined() || kept->memory.numel() < plan.scratch_bytes)
      kept->memory = allocated({plan.scratch_bytes}, {}, at::kByte, like, from);
    scratch = reinterpret_cast<uint64_t>(kept->memory.const_data_ptr());
  }
  for (int i = 0; i < num_arguments; i++)
    address[i] = tensors[i].defined() ? reinterpret_cast<uint64_t>(tensors[i].const_data_ptr()) : 0;
  int num = num_arguments;
  for (size_t i = 0; i < plan.allocations.size(); i++, num++) {
    auto &made = plan.allocations[i];
    if (kept && plan.scratch_at[i] >= 0) {
      address[num] = scratch + uint64_t(plan.scratch_at[i]);
      continue;
    }
    tensors[num] = allocated(made.sizes, made.strides, made.type, like, from);
    address[num] = reinterpret_cast<uint64_t>(tensors[num].const_data_ptr());
  }
  for (auto &step : plan.steps) {
    if (step.x == PRODUCT) {
      multiply(step, tensors);
      continue;
    }
    uint64_t slots[MAX_PARAMS];
    void *params[MAX_PARAMS];
    size_t count = step.params.size();
    for (size_t i = 0; i < count; i++) {
      auto &param = step.params[i];
      slots[i] = param.value + (param.source >= 0 ? address[param.source] : 0);
      params[i] = &slots[i];
    }
    if (step.x == THROUGH) {
      refuse(start_plan(step.handle, slots, int(count), stream));
      continue;
    }
    slots[count] = slots[count + 1] = 0; /* Triton's two scratch pointers, which our kernels do not use */
    params[count] = &slots[count];
    params[count + 1] = &slots[count + 1];
    if (!step.x || !step.y) continue;
    auto *handle = step.handle;
    context_current(&current);
    if (current != handle->context) context_push(handle->context);
    int code = handle->cooperative ? launch_cooperative(handle->function, step.x, step.y, 1, handle->threads, 1, 1,
                                                        handle->shared, stream, params)
                                   : launch_kernel(handle->function, step.x, step.y, 1, handle->threads, 1, 1,
                                                   handle->shared, stream, params, nullptr);
    if (current != handle->context) context_pop(&popped);
    refuse(code);
  }
}

/* --- gradients ----------------------------------------------------------------------------------------------------*/

struct Direct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *missed, *missed_back; /* Python's side: (words, args), (plan, words, saved, grads) */
  std::shared_ptr<Table> *table;
  std::string *name;
};

PyObject *bytes_of(const Words &words) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(words.word), 8 * Py_ssize_t(words.num));
}

PyObject *wrapped(const Tensor &t) {
  if (!t.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(t);
}

PyObject *wrapped_all(const std::vector<Tensor> &tensors) {
  PyObject *made = PyTuple_New(Py_ssize_t(tensors.size()));
  for (size_t i = 0; made && i < tensors.size(); i++) {
    PyObject *one = wrapped(tensors[i]);
    if (!one) {
      Py_CLEAR(made);
      break;
    }
    PyTuple_SET_ITEM(made, Py_ssize_t(i), one);
  }
  return made;
}

[[noreturn]] void throw_python() {
  python_error error;
  error.persist();
  throw std::move(error);
}

struct Gradient : public Node {
  Direct *direct; /* lives as long as the process */
  PlanPointer plan;
  std::vector<SavedVariable> saved;
  std::vector<int> edge_of; /* for every argument its edge, or -1 */

  std::string name() const override { return *direct->name + "_backward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &one : saved) one.reset_data();
  }

  variable_list apply(variable_list &&grads) override {
    for (size_t i = 0; plan->fills && i < grads.size(); i++)
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    std::vector<Tensor> kept;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto self = getptr();
      for (auto &one : saved) kept.push_back(one.unpack(self));
    }
    Words words;
    bool plain = !c10::GradMode::is_enabled() && !c10::impl::dispatch_mode_enabled();
    Tensor tensors[MAX_TENSORS];
    int num = 0;
    plain = plain && kept.size() + grads.size() <= MAX_TENSORS / 2;
    for (auto *group : {&kept, &grads})
      for (auto &t : *group) {
        if (!plain) break;
        if (!t.defined()) words.add(NOTHING);
        else if ((plain = describe(words, t, false))) describe_twins(words, tensors, num, t);
        tensors[num++] = t;
      }
    PlanPointer found;
    bool known = plain && words.ok && plan->backward->find(words, found);
    if (found) return replayed(*found, tensors, num);
    return asked(plain && words.ok && !known ? &words : nullptr, kept, grads); /* known without a plan: never noted again */
  }

  variable_list replayed(const Plan &back, Tensor *tensors, int num) {
    repeat(back, tensors, num);
    variable_list found(num_outputs());
    for (size_t i = 0; i < back.outputs.size() && i < edge_of.size(); i++)
      if (edge_of[i] >= 0 && back.outputs[i] >= 0) found[size_t(edge_of[i])] = tensors[back.outputs[i]];
    return found;
  }

  variable_list asked(const Words *words, std::vector<Tensor> &kept, variable_list &grads) {
    pybind11::gil_scoped_acquire gil;
    PyObject *key = words ? bytes_of(*words) : Py_NewRef(Py_None);
    PyObject *saved_tuple = wrapped_all(kept), *grads_tuple = wrapped_all(grads);
    PyObject *found = nullptr;
    if (key && saved_tuple && grads_tuple)
      found = PyObject_CallFunction(direct->missed_back, "LOOO", static_cast<long long>(plan->id), key, saved_tuple,
                                    grads_tuple);
    Py_XDECREF(key);
    Py_XDECREF(saved_tuple);
    Py_XDECREF(grads_tuple);
    if (!found) throw_python();
    variable_list results(num_outputs());
    bool right = PyTuple_Check(found);
    for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(found) && i < Py_ssize_t(edge_of.size()); i++) {
      PyObject *one = PyTuple_GET_ITEM(found, i);
      if (one != Py_None && edge_of[size_t(i)] >= 0) results[size_t(edge_of[size_t(i)])] = THPVariable_Unpack(one);
    }
    Py_DECREF(found);
    if (!right) throw std::runtime_error("a backward pass returns a tuple");
    return results;
  }
};

template <class T>
void make_node(std::shared_ptr<T> &pointer, Gradient *made) {
  pointer = std::shared_ptr<T>(made, [](T *node) { deleteNode(node); });
}
template <class T>
void make_node(c10::intrusive_ptr<T> &pointer, Gradient *made) {
  pointer = c10::intrusive_ptr<T>::unsafe_steal_from_new(made);
}

/* History for what is shown of the outputs, and a snapshot of what the backward pass will need. */
void record(Direct *self, const PlanPointer &plan, Tensor *tensors, const bool *is_tensor, int num_arguments) {
  auto *node = new Gradient();
  NodePointer owner;
  make_node(owner, node);
  node->direct = self;
  node->plan = plan;
  torch::autograd::edge_list edges;
  for (int i = 0; i < num_arguments; i++) {
    node->edge_of.push_back(is_tensor[i] ? int(edges.size()) : -1);
    if (is_tensor[i]) edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
  }
  node->set_next_edges(std::move(edges));
  for (int i = 0; i < plan->num_shown; i++) torch::autograd::set_history(tensors[plan->outputs[size_t(i)]], owner);
  for (int at : plan->saved) {
    if (at < 0) node->saved.emplace_back();
    else node->saved.emplace_back(tensors[at], at >= num_arguments && tensors[at].requires_grad());
  }
}

/* --- the callable -------------------------------------------------------------------------------------------------*/

PyTypeObject *tensor_type, *parameter_type;

/* Words of a call and its tensors; false where only Python may handle it. */
bool describe_call(Words &words, PyObject *const *args, Py_ssize_t num, Tensor *tensors, bool *is_tensor,
                   bool &recorded) {
  if (num > MAX_TENSORS / 2 || c10::impl::dispatch_mode_enabled()) return false;
  if (c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    return false;
  bool enabled = c10::GradMode::is_enabled(), any = false;
  words.add(uint64_t(enabled) | uint64_t(c10::InferenceMode::is_enabled()) << 1);
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *value = args[i];
    PyTypeObject *type = Py_TYPE(value);
    is_tensor[i] = type == tensor_type || type == parameter_type;
    if (is_tensor[i]) {
      tensors[i] = THPVariable_Unpack(value);
      if (!describe(words, tensors[i], enabled)) return false;
      describe_twins(words, tensors, int(i), tensors[i]);
      any = any || (enabled && tensors[i].requires_grad());
    } else if (type == &PyFloat_Type) {
      double number = PyFloat_AS_DOUBLE(value);
      uint64_t bits;
      std::memcpy(&bits, &number, 8);
      words.add(FLOAT);
      words.add(bits);
    } else if (type == &PyLong_Type) {
      int overflow = 0;
      long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow) return false;
      words.add(INTEGER);
      words.add(uint64_t(number));
    } else if (value == Py_None) {
      words.add(NOTHING);
    } else if (type == &PyBool_Type) {
      words.add(TRUTH | uint64_t(value == Py_True) << 4);
    } else if (type == &PyUnicode_Type) {
      words.add(TEXT);
      words.add(uint64_t(PyObject_Hash(value)));
    } else if (type == &PyTuple_Type && PyTuple_GET_SIZE(value) == 2 && PyLong_CheckExact(PyTuple_GET_ITEM(value, 0)) &&
               PyLong_CheckExact(PyTuple_GET_ITEM(value, 1))) {
      words.add(PAIR);
      for (Py_ssize_t j = 0; j < 2; j++) {
        int overflow = 0;
        words.add(uint64_t(PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(value, j), &overflow)));
        if (overflow) return false;
      }
    } else {
      return false;
    }
  }
  recorded = any;
  return words.ok;
}

PyObject *shown(const Plan &plan, Tensor *tensors) {
  if (plan.single) return wrapped(tensors[plan.outputs[0]]);
  PyObject *made = PyTuple_New(plan.num_shown);
  for (int i = 0; made && i < plan.num_shown; i++) {
    PyObject *one = wrapped(tensors[plan.outputs[size_t(i)]]);
    if (!one) {
      Py_DECREF(made);
      return nullptr;
    }
    PyTuple_SET_ITEM(made, i, one);
  }
  return made;
}

PyObject *ask_python(PyObject *who, PyObject *key, PyObject *const *args, Py_ssize_t num) {
  if (!key) return nullptr;
  PyObject *tuple = PyTuple_New(num);
  PyObject *found = nullptr;
  if (tuple) {
    for (Py_ssize_t i = 0; i < num; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    found = PyObject_CallFunctionObjArgs(who, key, tuple, nullptr);
    Py_DECREF(tuple);
  }
  Py_DECREF(key);
  return found;
}

PyObject *guarded(PyObject *(*body)(Direct *, PyObject *const *, Py_ssize_t), Direct *self, PyObject *const *args,
                  Py_ssize_t num) {
  try {
    return body(self, args, num);
  } catch (python_error &error) {
    error.restore();
  } catch (const c10::Error &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/* The last plan that a primitive repeated inside a call of a public function, and for which tensors. */
struct Heard {
  Direct *who = nullptr;
  PlanPointer plan;
  const void *tensors[MAX_TENSORS];
  int num = 0, times = 0;
  PyObject *result = nullptr;
};
thread_local Heard *listening = nullptr;

struct Unlocked { /* a full queue of launches makes this thread wait, and only this one */
  PyThreadState *state = PyEval_SaveThread();
  ~Unlocked() { PyEval_RestoreThread(state); }
};

PyObject *repeated(Direct *self, const PlanPointer &plan, Tensor *tensors, const bool *is_tensor, int num) {
  {
    Unlocked others;
    repeat(*plan, tensors, num);
  }
  if (plan->keeps) record(self, plan, tensors, is_tensor, num);
  return shown(*plan, tensors);
}

PyObject *run(Direct *self, PyObject *const *args, Py_ssize_t num) {
  Words words;
  Tensor tensors[MAX_TENSORS];
  bool is_tensor[MAX_TENSORS], recorded = false;
  PlanPointer plan;
  if (!describe_call(words, args, num, tensors, is_tensor, recorded))
    return ask_python(self->missed, Py_NewRef(Py_None), args, num);
  if (!(*self->table)->find(words, plan)) return ask_python(self->missed, bytes_of(words), args, num);
  if (!plan || plan->keeps != recorded) return ask_python(self->missed, Py_NewRef(Py_None), args, num);
  PyObject *found = repeated(self, plan, tensors, is_tensor, int(num));
  if (listening) {
    listening->who = self;
    listening->plan = plan;
    listening->num = int(num);
    listening->times++;
    listening->result = found;
    for (Py_ssize_t i = 0; i < num; i++) listening->tensors[i] = is_tensor[i] ? tensors[i].unsafeGetTensorImpl() : nullptr;
  }
  return found;
}

PyObject *called(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  if (names && PyTuple_GET_SIZE(names)) {
    PyErr_SetString(PyExc_TypeError, "a primitive takes no keyword arguments");
    return nullptr;
  }
  return guarded(run, reinterpret_cast<Direct *>(self), args, PyVectorcall_NARGS(flags));
}

/* --- public functions ---------------------------------------------------------------------------------------------*/

struct Front {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *function; /* what fills in the rest and calls the primitive */
  Direct *direct;
  Table *table;
};

/* The function itself; and if all it did with its tensors was to hand them to its primitive, that is remembered. */
PyObject *ask_function(Front *self, const Words *words, PyObject *const *args, Py_ssize_t num, const Tensor *tensors,
                       const bool *is_tensor) {
  Heard heard, *outer = listening;
  listening = &heard;
  PyObject *found = PyObject_Vectorcall(self->function, args, size_t(num), nullptr);
  listening = outer;
  if (!found || !words || heard.times != 1 || heard.who != self->direct || heard.result != found) return found;
  std::vector<int> from;
  for (int i = 0; i < heard.num; i++) {
    from.push_back(-1);
    for (int j = 0; heard.tensors[i] && j < int(num) && from.back() < 0; j++)
      if (is_tensor[j] && tensors[j].unsafeGetTensorImpl() == heard.tensors[i]) from.back() = j;
    if (heard.tensors[i] && from.back() < 0) return found;
  }
  self->table->add(*words, heard.plan, std::move(from));
  return found;
}

PyObject *front_body(Direct *it, PyObject *const *args, Py_ssize_t num) {
  auto *self = reinterpret_cast<Front *>(it);
  Words words;
  Tensor tensors[MAX_TENSORS];
  bool is_tensor[MAX_TENSORS], recorded = false;
  auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
  bool plain = off.has(c10::DispatchKey::AutocastCUDA) && off.has(c10::DispatchKey::AutocastCPU) &&
               describe_call(words, args, num, tensors, is_tensor, recorded);
  PlanPointer plan;
  int from[MAX_TENSORS], num_from = 0;
  if (!plain) return ask_function(self, nullptr, args, num, tensors, is_tensor);
  if (!self->table->find(words, plan, from, &num_from) || plan->keeps != recorded)
    return ask_function(self, plan ? nullptr : &words, args, num, tensors, is_tensor);
  Tensor given[MAX_TENSORS];
  bool given_tensor[MAX_TENSORS];
  for (int i = 0; i < num_from; i++)
    if ((given_tensor[i] = from[i] >= 0)) given[i] = tensors[from[i]];
  return repeated(self->direct, plan, given, given_tensor, num_from);
}

PyObject *front_called(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  if (names && PyTuple_GET_SIZE(names)) {
    PyErr_SetString(PyExc_TypeError, "what stands in front of a primitive takes no keyword arguments");
    return nullptr;
  }
  return guarded(front_body, reinterpret_cast<Direct *>(self), args, PyVectorcall_NARGS(flags));
}

PyObject *front_clear(PyObject *self, PyObject *) {
  reinterpret_cast<Front *>(self)->table->clear();
  Py_RETURN_NONE;
}

/* --- plans from Python --------------------------------------------------------------------------------------------*/

Words words_from(PyObject *bytes) {
  Words words;
  char *data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes, &data, &size)) throw_python();
  if (size % 8 || size / 8 > MAX_WORDS) throw std::runtime_error("these are no words of a call");
  std::memcpy(words.word, data, size_t(size));
  words.num = int(size / 8);
  return words;
}

std::vector<int64_t> integers(PyObject *sequence) {
  std::vector<int64_t> found;
  PyObject *fast = PySequence_Fast(sequence, "a sequence of integers");
  if (!fast) throw_python();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); i++)
    found.push_back(int64_t(PyLong_AsUnsignedLongLongMask(PySequence_Fast_GET_ITEM(fast, i))));
  Py_DECREF(fast);
  if (PyErr_Occurred()) throw_python();
  return found;
}

/* A list of lists of integers: what Python hands over is numbers only. */
std::vector<std::vector<int64_t>> rows(PyObject *sequence) {
  std::vector<std::vector<int64_t>> found;
  PyObject *fast = PySequence_Fast(sequence, "a sequence of sequences");
  if (!fast) throw_python();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); i++)
    found.push_back(integers(PySequence_Fast_GET_ITEM(fast, i)));
  Py_DECREF(fast);
  return found;
}

/* (id, device, first, arguments, shown, single, keeps, fills, allocations, steps, outputs, saved): an allocation is (type, number of
   sizes, *sizes, *strides), strides only where it is not contiguous; a step (handle, x, y, source, value, source, value, …),
   or (launcher.c's plan, -1, -1, source, value, …), or (place of a product, -2, -2, place, offset, number of sizes, *sizes,
   *strides, place, …) */
/* What is neither a result nor kept is scratch, one piece after the other. */
void place_scratch(Plan &plan, int num_arguments) {
  for (size_t i = 0; i < plan.allocations.size(); i++) {
    auto &made = plan.allocations[i];
    int at = num_arguments + int(i);
    bool stays = !made.strides.empty();
    for (auto *group : {&plan.outputs, &plan.saved})
      for (int one : *group) stays = stays || one == at;
    for (auto &step : plan.steps) { /* products take tensors */
      stays = stays || (step.x == PRODUCT && reinterpret_cast<intptr_t>(step.handle) == at);
      for (auto &view : step.views) stays = stays || view.place == at;
    }
    plan.scratch_at.push_back(stays ? -1 : plan.scratch_bytes);
    int64_t bytes = int64_t(c10::elementSize(made.type));
    for (auto size : made.sizes) bytes *= size;
    if (!stays) plan.scratch_bytes += (bytes + SCRATCH_STEP - 1) / SCRATCH_STEP * SCRATCH_STEP;
  }
}

std::vector<View> views_from(const std::vector<int64_t> &row) {
  std::vector<View> found;
  for (size_t i = 3; i < row.size(); i += 3 + 2 * size_t(row[i + 2])) {
    auto sizes = row.begin() + int64_t(i) + 3, strides = sizes + row.at(i + 2);
    if (strides + row[i + 2] > row.end()) throw std::runtime_error("a product's factor is cut off");
    found.push_back({int(row[i]), row[i + 1], {sizes, strides}, {strides, strides + row[i + 2]}});
  }
  if (found.size() < 2 || found.size() > 3) throw std::runtime_error("a product has two factors, and at most one summand");
  return found;
}

std::shared_ptr<Plan> plan_from(PyObject *spec) {
  long long id;
  int device, first, num_arguments, num_shown, single, keeps, fills;
  PyObject *allocations, *steps, *outputs, *saved;
  if (!PyArg_ParseTuple(spec, "LiiiipppOOOO", &id, &device, &first, &num_arguments, &num_shown, &single, &keeps, &fills,
                        &allocations, &steps, &outputs, &saved))
    throw_python();
  auto plan = std::make_shared<Plan>();
  plan->id = id;
  plan->device = device;
  plan->first = first;
  plan->num_shown = num_shown;
  plan->single = single;
  plan->keeps = keeps;
  plan->fills = fills;
  for (auto &row : rows(allocations)) {
    auto sizes = row.begin() + 2, strides = sizes + row.at(1);
    plan->allocations.push_back({{sizes, strides}, {strides, row.end()}, at::ScalarType(row.at(0))});
  }
  for (auto &row : rows(steps)) {
    Step step{reinterpret_cast<Handle *>(row.at(0)), unsigned(row.at(1)), unsigned(row.at(2)), {}, {}};
    if (step.x == PRODUCT) step.views = views_from(row);
    for (size_t i = 3; step.views.empty() && i + 1 < row.size(); i += 2) step.params.push_back({int(row[i]), uint64_t(row[i + 1])});
    if (step.params.size() + 2 > MAX_PARAMS) throw std::runtime_error("too many parameters for a launch");
    plan->steps.push_back(std::move(step));
  }
  for (auto at : integers(outputs)) plan->outputs.push_back(int(at));
  for (auto at : integers(saved)) plan->saved.push_back(int(at));
  plan->backward = std::make_shared<Table>();
  place_scratch(*plan, num_arguments);
  if (plan->allocations.size() + size_t(MAX_TENSORS) / 2 > MAX_TENSORS) throw std::runtime_error("too many tensors");
  return plan;
}

std::unordered_map<int64_t, std::weak_ptr<Plan>> plans_by_id;

PyObject *add_body(Direct *self, PyObject *const *args, Py_ssize_t num) {
  if (num != 2) throw std::runtime_error("add(words, plan)");
  auto words = words_from(args[0]);
  std::shared_ptr<Plan> plan;
  if (args[1] != Py_None) {
    open_driver();
    plan = plan_from(args[1]);
    if (plans_by_id.size() > 8192) std::erase_if(plans_by_id, [](auto &item) { return item.second.expired(); });
    plans_by_id[plan->id] = plan;
  }
  (*self->table)->add(words, plan);
  Py_RETURN_NONE;
}

PyObject *add_back_body(Direct *self, PyObject *const *args, Py_ssize_t num) {
  if (num != 3) throw std::runtime_error("add_back(id, words, plan)");
  auto found = plans_by_id.find(PyLong_AsLongLong(args[0]));
  if (PyErr_Occurred()) throw_python();
  auto forward = found == plans_by_id.end() ? nullptr : found->second.lock();
  if (forward) forward->backward->add(words_from(args[1]), args[2] == Py_None ? nullptr : plan_from(args[2]));
  Py_RETURN_NONE;
}

PyObject *add(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  return guarded(add_body, reinterpret_cast<Direct *>(self), args, num);
}

PyObject *add_back(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  return guarded(add_back_body, reinterpret_cast<Direct *>(self), args, num);
}

PyObject *clear(PyObject *self, PyObject *) {
  (*reinterpret_cast<Direct *>(self)->table)->clear();
  Py_RETURN_NONE;
}

/* Never freed: nodes of graphs point at it, and primitives live as long as the process. */
PyObject *made(PyTypeObject *type, PyObject *args, PyObject *) {
  const char *name;
  PyObject *missed, *missed_back;
  if (!PyArg_ParseTuple(args, "sOO", &name, &missed, &missed_back)) return nullptr;
  auto *self = reinterpret_cast<Direct *>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = called;
  self->missed = Py_NewRef(missed);
  self->missed_back = Py_NewRef(missed_back);
  self->table = new std::shared_ptr<Table>(std::make_shared<Table>());
  self->name = new std::string(name);
  Py_INCREF(self);
  return reinterpret_cast<PyObject *>(self);
}

PyMethodDef direct_methods[] = {
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL, "add(words, plan)"},
    {"add_back", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add_back)), METH_FASTCALL,
     "add_back(id, words, plan)"},
    {"clear", clear, METH_NOARGS, "clear()"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject direct_type = {PyVarObject_HEAD_INIT(nullptr, 0)}, front_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

/* Front(direct, function); never freed, as what it stands in front of */
PyObject *front_made(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *direct, *function;
  if (!PyArg_ParseTuple(args, "O!O", &direct_type, &direct, &function)) return nullptr;
  auto *self = reinterpret_cast<Front *>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = front_called;
  self->function = Py_NewRef(function);
  self->direct = reinterpret_cast<Direct *>(Py_NewRef(direct));
  self->table = new Table();
  Py_INCREF(self);
  return reinterpret_cast<PyObject *>(self);
}

PyMethodDef front_methods[] = {{"clear", front_clear, METH_NOARGS, "clear()"}, {nullptr, nullptr, 0, nullptr}};

PyObject *types(PyObject *, PyObject *args) {
  PyObject *tensor, *parameter;
  if (!PyArg_ParseTuple(args, "OO", &tensor, &parameter)) return nullptr;
  tensor_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(parameter));
  Py_RETURN_NONE;
}

PyObject *starts(PyObject *, PyObject *address) {
  start_plan = reinterpret_cast<int (*)(void *, const uint64_t *, int, void *)>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef module_methods[] = {{"types", types, METH_VARARGS, "types(Tensor, Parameter)"},
                                {"starts", starts, METH_O, "starts(the address of what starts launcher.c's plans)"},
                                {nullptr, nullptr, 0, nullptr}};
struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ridgeline_direct", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_ridgeline_direct(void) {
  direct_type.tp_name = "ridgeline_direct.Direct";
  direct_type.tp_basicsize = sizeof(Direct);
  direct_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  direct_type.tp_vectorcall_offset = offsetof(Direct, call);
  direct_type.tp_call = PyVectorcall_Call;
  direct_type.tp_methods = direct_methods;
  direct_type.tp_new = made;
  front_type.tp_name = "ridgeline_direct.Front";
  front_type.tp_basicsize = sizeof(Front);
  front_type.tp_flags = direct_type.tp_flags;
  front_type.tp_vectorcall_offset = offsetof(Front, call);
  front_type.tp_call = PyVectorcall_Call;
  front_type.tp_methods = front_methods;
  front_type.tp_new = front_made;
  if (PyType_Ready(&direct_type) || PyType_Ready(&front_type)) return nullptr;
  PyObject *module = PyModule_Create(&definition);
  if (module) PyModule_AddObjectRef(module, "Direct", reinterpret_cast<PyObject *>(&direct_type));
  if (module) PyModule_AddObjectRef(module, "Front", reinterpret_cast<PyObject *>(&front_type));
  return module;
}
