/* One launcher for every kernel: loads a cubin into a device's primary context and starts it from Python.

   Built once against Python's stable ABI, so one shared object serves every Python from 3.11 on; the CUDA driver is
   opened at run time, so nothing is linked and it builds on machines without a GPU. Every kernel argument takes an
   eight-byte slot: the driver reads as many bytes of it as the kernel declares, which on a little-endian host is right
   for pointers, 64-bit and 32-bit integers; floats are stored as 32-bit. A tensor that a kernel reads in blocks through
   the copy engine becomes a tensor map: encoded when its address is first seen, then found again in a small cache.
   call_cache.cpp starts plans through ridgeline_start, without Python and from any thread. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ARGS 64
#define MAX_MAPS 8
#define MAX_RANK 5
#define MAP_BYTES 128
#define CACHED_MAPS 32 /* a power of two */
#define MAX_PARAMS (MAX_ARGS + MAX_MAPS * 2 * MAX_RANK + 2)
#define DEPENDENT_LAUNCH 6   /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
#define CLUSTER_LAUNCH 4     /* CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION */
#define LARGE_CLUSTERS 14    /* CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED */
#define PORTABLE_CLUSTER 8   /* programs; more must be allowed a kernel */
#define L2_PROMOTION_128B 2  /* CU_TENSOR_MAP_L2_PROMOTION_L2_128B */
#define MAX_DYNAMIC_SHARED 8 /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
#define NUM_REGS 4           /* CU_FUNC_ATTRIBUTE_NUM_REGS */
#define LOCAL_BYTES 3        /* CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES */

typedef int Result;
typedef struct {
  void *function, *context;
  unsigned threads, shared;
  int cooperative;
} Handle;
/* How a tensor is cut into blocks, and the maps of the addresses seen so far. */
typedef struct {
  unsigned type, swizzle;
  int rank;
  uint64_t sizes[MAX_RANK], step_bytes[MAX_RANK]; /* innermost first */
  unsigned box[MAX_RANK];
  uint64_t params[2 * MAX_RANK]; /* shape and strides as the kernel takes them, outermost first */
  struct {
    uint64_t address;
    _Alignas(64) unsigned char map[MAP_BYTES];
  } cached[CACHED_MAPS];
} Blocks;
typedef struct {
  Handle *handle;
  unsigned x, y, cluster; /* programs that start together, on neighboring multiprocessors */
  PyObject *device, *stream_of;
  int dependent, num_maps;
  Py_ssize_t map_at[MAX_MAPS];
  Blocks *maps[MAX_MAPS];
} Plan;
typedef struct { /* CUlaunchAttribute, as wide as the driver's */
  int id, unused;
  union {
    char bytes[64];
    int number;
    unsigned size[3];
  } value;
} Attribute;
typedef struct { /* CUlaunchConfig */
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
} Config;

static Result (*cuInit)(unsigned);
static Result (*cuDeviceGet)(int *, int);
static Result (*cuDevicePrimaryCtxRetain)(void **, int);
static Result (*cuCtxGetCurrent)(void **);
static Result (*cuCtxPushCurrent)(void *);
static Result (*cuCtxPopCurrent)(void **);
static Result (*cuModuleLoadData)(void **, const void *);
static Result (*cuModuleGetFunction)(void **, void *, const char *);
static Result (*cuFuncSetAttribute)(void *, int, int);
static Result (*cuFuncGetAttribute)(int *, int, void *);
static Result (*cuGetErrorString)(Result, const char **);
typedef Result (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);
typedef Result (*CooperativeLaunch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                    void *, void **);
typedef Result (*ConfiguredLaunch)(const Config *, void *, void **, void **);
typedef Result (*ActiveClusters)(int *, void *, const Config *);
typedef Result (*EncodeTiled)(void *, unsigned, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *,
                              const unsigned *, unsigned, unsigned, unsigned, unsigned);
static EncodeTiled cuTensorMapEncodeTiled;
static ConfiguredLaunch cuLaunchKernelEx;
static ActiveClusters cuOccupancyMaxActiveClusters;
static Launch cuLaunchKernel;
static CooperativeLaunch cuLaunchCooperativeKernel;
static PyObject *data_ptr_name, *watcher;

static int open_driver(void) {
  if (cuLaunchKernel) return 1;
  void *lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!lib) {
    PyErr_SetString(PyExc_RuntimeError, "libcuda.so.1 cannot be opened: no NVIDIA driver on this machine");
    return 0;
  }
#define FIND(name, symbol)                                                                                             \
  *(void **)(&name) = dlsym(lib, symbol);                                                                              \
  if (!name) {                                                                                                         \
    PyErr_SetString(PyExc_RuntimeError, "the NVIDIA driver lacks " symbol);                                            \
    return 0;                                                                                                          \
  }
  FIND(cuInit, "cuInit")
  FIND(cuDeviceGet, "cuDeviceGet")
  FIND(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")
  FIND(cuCtxGetCurrent, "cuCtxGetCurrent")
  FIND(cuCtxPushCurrent, "cuCtxPushCurrent_v2")
  FIND(cuCtxPopCurrent, "cuCtxPopCurrent_v2")
  FIND(cuModuleLoadData, "cuModuleLoadData")
  FIND(cuModuleGetFunction, "cuModuleGetFunction")
  FIND(cuFuncSetAttribute, "cuFuncSetAttribute")
  FIND(cuFuncGetAttribute, "cuFuncGetAttribute")
  FIND(cuGetErrorString, "cuGetErrorString")
  FIND(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel")
  FIND(cuLaunchKernelEx, "cuLaunchKernelEx")
  FIND(cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters")
  FIND(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled")
  FIND(cuLaunchKernel, "cuLaunchKernel")
  return 1;
}

static int failed(Result code, const char *what) {
  if (!code) return 0;
  const char *text = "unknown error";
  cuGetErrorString(code, &text);
  PyErr_Format(PyExc_RuntimeError, "%s failed: CUDA error %d, %s", what, code, text);
  return 1;
}

/* load(device, cubin, name, threads, shared, cooperative) -> (handle, registers, local bytes) */
static PyObject *load(PyObject *self, PyObject *args) {
  int device, cooperative, regs = 0, local = 0;
  const char *cubin, *name;
  Py_ssize_t size;
  unsigned threads, shared;
  if (!PyArg_ParseTuple(args, "iy#sIIp", &device, &cubin, &size, &name, &threads, &shared, &cooperative)) return NULL;
  if (!open_driver()) return NULL;
  void *context, *module, *function, *popped;
  int ordinal;
  if (failed(cuInit(0), "cuInit") || failed(cuDeviceGet(&ordinal, device), "cuDeviceGet") ||
      failed(cuDevicePrimaryCtxRetain(&context, ordinal), "cuDevicePrimaryCtxRetain") ||
      failed(cuCtxPushCurrent(context), "cuCtxPushCurrent"))
    return NULL;
  int bad = failed(cuModuleLoadData(&module, cubin), "cuModuleLoadData") ||
            failed(cuModuleGetFunction(&function, module, name), "cuModuleGetFunction") ||
            (shared > 48 * 1024 &&
             failed(cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, (int)shared), "cuFuncSetAttribute"));
  if (!bad) {
    cuFuncGetAttribute(&regs, NUM_REGS, function);
    cuFuncGetAttribute(&local, LOCAL_BYTES, function);
  }
  cuCtxPopCurrent(&popped);
  if (bad) return NULL;
  Handle *handle = malloc(sizeof(Handle));
  if (!handle) return PyErr_NoMemory();
  *handle = (Handle){function, context, threads, shared, cooperative};
  return Py_BuildValue("(Nii)", PyLong_FromVoidPtr(handle), regs, local);
}

static int fill(uint64_t *slot, PyObject *value) {
  if (PyLong_Check(value)) {
    *slot = PyLong_AsUnsignedLongLongMask(value);
    return !PyErr_Occurred();
  }
  if (PyFloat_Check(value)) {
    float number = (float)PyFloat_AsDouble(value);
    *slot = 0;
    memcpy(slot, &number, sizeof(number));
    return 1;
  }
  if (value == Py_None) {
    *slot = 0;
    return 1;
  }
  PyObject *pointer = PyObject_CallMethodObjArgs(value, data_ptr_name, NULL);
  if (!pointer) return 0;
  *slot = PyLong_AsUnsignedLongLongMask(pointer);
  Py_DECREF(pointer);
  return !PyErr_Occurred();
}

/* blocks(type, item bytes, swizzle, shape, strides, box) -> blocks: lists from the outermost dim to the innermost */
static PyObject *blocks(PyObject *self, PyObject *args) {
  unsigned type, item, swizzle;
  PyObject *shape, *strides, *box;
  if (!PyArg_ParseTuple(args, "IIIO!O!O!", &type, &item, &swizzle, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                        &PyTuple_Type, &box))
    return NULL;
  Py_ssize_t rank = PyTuple_Size(shape);
  if (rank < 1 || rank > MAX_RANK || PyTuple_Size(strides) != rank || PyTuple_Size(box) != rank) {
    PyErr_SetString(PyExc_ValueError, "shape, strides and box have one to five dims, all alike");
    return NULL;
  }
  Blocks *made = aligned_alloc(64, (sizeof(Blocks) + 63) / 64 * 64);
  if (!made) return PyErr_NoMemory();
  memset(made, 0, sizeof(Blocks));
  made->type = type;
  made->swizzle = swizzle;
  made->rank = (int)rank;
  for (Py_ssize_t i = 0; i < rank; i++) {
    Py_ssize_t inner = rank - 1 - i;
    uint64_t stride = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(strides, i));
    made->params[i] = made->sizes[inner] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(shape, i));
    made->params[rank + i] = stride;
    made->box[inner] = (unsigned)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(box, i));
    if (inner > 0) made->step_bytes[inner - 1] = stride * item; /* the innermost dim is dense */
  }
  if (PyErr_Occurred()) {
    free(made);
    return NULL;
  }
  return PyLong_FromVoidPtr(made);
}

/* The map of a tensor at this address, copied to where the launch reads it: another thread may reuse the cache. */
static Result put_map(Blocks *of, uint64_t address, unsigned char *to) {
  static const unsigned ones[MAX_RANK] = {1, 1, 1, 1, 1};
  static char busy;
  unsigned at = (unsigned)((address >> 9) ^ (address >> 14) ^ (address >> 21)) & (CACHED_MAPS - 1);
  Result code = 0;
  while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) sched_yield();
  if (of->cached[at].address != address || !address) {
    of->cached[at].address = 0;
    code = cuTensorMapEncodeTiled(of->cached[at].map, of->type, (unsigned)of->rank, (void *)address, of->sizes,
                                  of->step_bytes, of->box, ones, 0, of->swizzle, L2_PROMOTION_128B, 0);
    if (!code) of->cached[at].address = address;
  }
  memcpy(to, of->cached[at].map, MAP_BYTES);
  __atomic_clear(&busy, __ATOMIC_RELEASE);
  return code;
}

static int allow_large(Handle *handle) {
  void *popped;
  if (failed(cuCtxPushCurrent(handle->context), "cuCtxPushCurrent")) return 0;
  int bad = failed(cuFuncSetAttribute(handle->function, LARGE_CLUSTERS, 1), "cuFuncSetAttribute");
  cuCtxPopCurrent(&popped);
  return !bad;
}

/* plan(handle, device, grid_x, grid_y, stream_of, dependent, maps, cluster) -> plan: everything of a launch but its
   arguments and the stream. maps: (index of an argument, blocks) for every tensor that goes through the copy engine, in
   order. dependent: the kernel may start while the one before it ends, and waits for it itself. cluster: so many
   programs in a row are on the device together; 1 where it is not given. */
static PyObject *plan(PyObject *self, PyObject *args) {
  PyObject *handle, *device, *stream_of, *maps;
  unsigned x, y, cluster = 1;
  int dependent;
  if (!PyArg_ParseTuple(args, "OOIIOpO!|I", &handle, &device, &x, &y, &stream_of, &dependent, &PyTuple_Type, &maps,
                        &cluster))
    return NULL;
  Py_ssize_t num = PyTuple_Size(maps);
  if (num > MAX_MAPS) {
    PyErr_SetString(PyExc_ValueError, "a kernel takes at most 8 tensors in blocks");
    return NULL;
  }
  if (!cluster || x % cluster) {
    PyErr_SetString(PyExc_ValueError, "programs of a grid are a multiple of those of a cluster");
    return NULL;
  }
  if (cluster > PORTABLE_CLUSTER && !allow_large(PyLong_AsVoidPtr(handle))) return NULL;
  Plan *made = malloc(sizeof(Plan));
  if (!made) return PyErr_NoMemory();
  *made = (Plan){.handle = PyLong_AsVoidPtr(handle), .x = x, .y = y, .cluster = cluster, .device = device, .stream_of = stream_of,
                 .dependent = dependent, .num_maps = (int)num};
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *pair = PyTuple_GetItem(maps, i);
    PyObject *at = PyTuple_GetItem(pair, 0), *of = PyTuple_GetItem(pair, 1);
    if (!at || !of) break;
    made->map_at[i] = PyLong_AsSsize_t(at);
    made->maps[i] = PyLong_AsVoidPtr(of);
  }
  if (PyErr_Occurred()) {
    free(made);
    return NULL;
  }
  Py_INCREF(device);
  Py_INCREF(stream_of);
  return PyLong_FromVoidPtr(made);
}

static PyObject *tell(PyObject *const *args, Py_ssize_t num) {
  PyObject *tuple = PyTuple_New(num);
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < num; i++) {
    Py_INCREF(args[i]);
    PyTuple_SetItem(tuple, i, args[i]);
  }
  PyObject *done = PyObject_CallObject(watcher, tuple);
  Py_DECREF(tuple);
  return done;
}

static Result start(Handle *handle, Plan *made, void *stream, void **params) {
  if (handle->cooperative)
    return cuLaunchCooperativeKernel(handle->function, made->x, made->y, 1, handle->threads, 1, 1, handle->shared,
                                     stream, params);
  if (made->dependent || made->cluster > 1) {
    Attribute attributes[2] = {{0}};
    unsigned num = 0;
    if (made->dependent) {
      attributes[num].id = DEPENDENT_LAUNCH;
      attributes[num++].value.number = 1;
    }
    if (made->cluster > 1) {
      attributes[num].id = CLUSTER_LAUNCH;
      attributes[num].value.size[0] = made->cluster;
      attributes[num].value.size[1] = attributes[num].value.size[2] = 1;
      num++;
    }
    Config config = {{made->x, made->y, 1}, {handle->threads, 1, 1}, handle->shared, stream, attributes, num};
    return cuLaunchKernelEx(&config, handle->function, params, NULL);
  }
  return cuLaunchKernel(handle->function, made->x, made->y, 1, handle->threads, 1, 1, handle->shared, stream, params,
                        NULL);
}

/* Tensor maps, parameters in the order the kernel takes them, and the launch. `slots` has room for two more. */
static Result begin(Plan *made, uint64_t *slots, Py_ssize_t given, void *stream, const char **what) {
  Handle *handle = made->handle;
  void *params[MAX_PARAMS], *current = NULL, *popped;
  _Alignas(64) unsigned char maps[MAX_MAPS][MAP_BYTES];
  int filled = 0, next = 0;
  Result code = 0;
  *what = "cuTensorMapEncodeTiled";
  cuCtxGetCurrent(&current);
  if (current != handle->context) cuCtxPushCurrent(handle->context);
  for (Py_ssize_t i = 0; i < given && !code; i++) {
    if (next == made->num_maps || made->map_at[next] != i) {
      params[filled++] = &slots[i];
      continue;
    }
    Blocks *of = made->maps[next];
    code = put_map(of, slots[i], maps[next]);
    params[filled++] = maps[next++];
    for (int j = 0; j < 2 * of->rank; j++) params[filled++] = &of->params[j];
  }
  slots[given] = slots[given + 1] = 0; /* Triton's two scratch pointers, which our kernels do not use */
  params[filled++] = &slots[given];
  params[filled++] = &slots[given + 1];
  if (!code && made->x && made->y) {
    *what = "cuLaunchKernel";
    code = start(handle, made, stream, params);
  }
  if (current != handle->context) cuCtxPopCurrent(&popped);
  return code;
}

/* What call_cache.cpp calls: the driver's error, 0 for none. */
static int ridgeline_start(void *made, const uint64_t *values, int num, void *stream) {
  uint64_t slots[MAX_ARGS + 2];
  const char *what;
  memcpy(slots, values, sizeof(uint64_t) * (size_t)num);
  return begin(made, slots, num, stream, &what);
}

/* starter() -> the address of ridgeline_start */
static PyObject *starter(PyObject *self, PyObject *none) { return PyLong_FromVoidPtr((void *)ridgeline_start); }

/* launch(plan, *arguments) on the current stream: arguments are tensors, None, integers and floats, in order */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  if (num < 1 || num - 1 > MAX_ARGS) {
    PyErr_SetString(PyExc_TypeError, "launch(plan, *arguments)");
    return NULL;
  }
  Plan *made = PyLong_AsVoidPtr(args[0]);
  if (!made) return NULL;
  PyObject *number = PyObject_CallFunctionObjArgs(made->stream_of, made->device, NULL);
  if (!number) return NULL;
  void *stream = PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  if (PyErr_Occurred()) return NULL;
  uint64_t slots[MAX_ARGS + 2];
  for (Py_ssize_t i = 0; i < num - 1; i++)
    if (!fill(&slots[i], args[1 + i])) return NULL;
  const char *what;
  Result code;
  Py_BEGIN_ALLOW_THREADS;
  code = begin(made, slots, num - 1, stream, &what);
  Py_END_ALLOW_THREADS;
  if (failed(code, what)) return NULL;
  if (watcher) return tell(args, num);
  Py_RETURN_NONE;
}

/* watch(callable or None): who is told of every launch, with the same arguments */
static PyObject *watch(PyObject *self, PyObject *who) {
  PyObject *before = watcher;
  watcher = who == Py_None ? NULL : who;
  Py_XINCREF(watcher);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

/* fitting(plan, cluster) -> how many clusters of so many of its programs are on the device together */
static PyObject *fitting(PyObject *self, PyObject *args) {
  PyObject *number;
  unsigned cluster;
  if (!PyArg_ParseTuple(args, "OI", &number, &cluster)) return NULL;
  Plan *made = PyLong_AsVoidPtr(number);
  if (!made || (cluster > PORTABLE_CLUSTER && !allow_large(made->handle))) return NULL;
  Handle *handle = made->handle;
  Attribute size = {.id = CLUSTER_LAUNCH, .value.size = {cluster, 1, 1}};
  Config config = {{cluster, 1, 1}, {handle->threads, 1, 1}, handle->shared, NULL, &size, 1};
  int num = 0;
  void *popped;
  if (failed(cuCtxPushCurrent(handle->context), "cuCtxPushCurrent")) return NULL;
  int bad = failed(cuOccupancyMaxActiveClusters(&num, handle->function, &config), "cuOccupancyMaxActiveClusters");
  cuCtxPopCurrent(&popped);
  return bad ? NULL : PyLong_FromLong(num);
}

/* parts(plan) -> (handle, device, grid_x, grid_y, plain): plain without tensor maps and clusters, and started after
   what is ahead */
static PyObject *parts(PyObject *self, PyObject *number) {
  Plan *made = PyLong_AsVoidPtr(number);
  if (!made) return NULL;
  PyObject *plain = made->num_maps || made->dependent || made->cluster > 1 ? Py_False : Py_True;
  return Py_BuildValue("(NOIIO)", PyLong_FromVoidPtr(made->handle), made->device, made->x, made->y, plain);
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, "load(device, cubin, name, threads, shared, cooperative) -> (handle, registers, local)"},
    {"blocks", blocks, METH_VARARGS, "blocks(type, item bytes, swizzle, shape, strides, box) -> blocks"},
    {"plan", plan, METH_VARARGS, "plan(handle, device, grid_x, grid_y, stream_of, dependent, maps, cluster) -> plan"},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(plan, *arguments)"},
    {"watch", watch, METH_O, "watch(callable or None)"},
    {"starter", starter, METH_NOARGS, "starter() -> the address of what starts a plan without Python"},
    {"fitting", fitting, METH_VARARGS, "fitting(plan, cluster) -> clusters of its programs on the device together"},
    {"parts", parts, METH_O, "parts(plan) -> (handle, device, grid_x, grid_y, plain)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ridgeline_launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ridgeline_launcher(void) {
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  if (!data_ptr_name) return NULL;
  return PyModule_Create(&definition);
}
