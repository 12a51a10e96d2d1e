/* One launcher for every kernel: loads a cubin into a device's primary context and starts it from Python.

   Built once against Python's stable ABI, so one shared object serves every Python from 3.11 on; the CUDA driver is
   opened at run time, so nothing is linked and it builds on machines without a GPU. Every kernel argument takes an
   eight-byte slot: the driver reads as many bytes of it as the kernel declares, which on a little-endian host is right
   for pointers, 64-bit and 32-bit integers; floats are stored as 32-bit. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ARGS 64
#define MAX_DYNAMIC_SHARED 8 /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
#define NUM_REGS 4           /* CU_FUNC_ATTRIBUTE_NUM_REGS */
#define LOCAL_BYTES 3        /* CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES */

typedef int Result;
typedef struct {
  void *function, *context;
  unsigned threads, shared;
  int cooperative;
} Handle;
typedef struct {
  Handle *handle;
  unsigned x, y;
  int dependent;
  PyObject *device, *stream_of;
} Plan;
/* CUlaunchAttribute and CUlaunchConfig, of which we use one attribute: a value is 64 bytes, its first an int. */
typedef struct {
  int id, padding;
  union {
    int allowed;
    char bytes[64];
  } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
} Config;
#define PROGRAMMATIC_STREAM_SERIALIZATION 6

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
typedef Result (*LaunchEx)(const Config *, void *, void **, void **);
static Launch cuLaunchKernel;
static LaunchEx cuLaunchKernelEx; /* absent from drivers older than CUDA 11.8: then nothing starts early */
static CooperativeLaunch cuLaunchCooperativeKernel;
static PyObject *data_ptr_name;

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
  *(void **)(&cuLaunchKernelEx) = dlsym(lib, "cuLaunchKernelEx");
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

/* plan(handle, device, grid_x, grid_y, dependent, stream_of) -> plan: everything of a launch but its arguments and the
   stream. A dependent kernel may start before the one ahead of it in the stream has ended, and waits for it itself. */
static PyObject *plan(PyObject *self, PyObject *args) {
  PyObject *handle, *device, *stream_of;
  unsigned x, y;
  int dependent;
  if (!PyArg_ParseTuple(args, "OOIIpO", &handle, &device, &x, &y, &dependent, &stream_of)) return NULL;
  Plan *made = malloc(sizeof(Plan));
  if (!made) return PyErr_NoMemory();
  *made = (Plan){PyLong_AsVoidPtr(handle), x, y, dependent, device, stream_of};
  if (PyErr_Occurred()) {
    free(made);
    return NULL;
  }
  Py_INCREF(device);
  Py_INCREF(stream_of);
  return PyLong_FromVoidPtr(made);
}

static Result launch_dependent(const Plan *made, void *stream, void **params) {
  const Handle *handle = made->handle;
  Attribute early = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {.allowed = 1}};
  Config config = {{made->x, made->y, 1}, {handle->threads, 1, 1}, handle->shared, stream, &early, 1};
  return cuLaunchKernelEx(&config, handle->function, params, NULL);
}

/* launch(plan, *arguments) on the current stream: arguments are tensors, None, integers and floats, in order */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  if (num < 1 || num - 1 > MAX_ARGS) {
    PyErr_SetString(PyExc_TypeError, "launch(plan, *arguments)");
    return NULL;
  }
  Plan *made = PyLong_AsVoidPtr(args[0]);
  if (!made) return NULL;
  Handle *handle = made->handle;
  unsigned x = made->x, y = made->y;
  PyObject *number = PyObject_CallFunctionObjArgs(made->stream_of, made->device, NULL);
  if (!number) return NULL;
  void *stream = PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  if (PyErr_Occurred()) return NULL;
  uint64_t slots[MAX_ARGS + 2];
  void *params[MAX_ARGS + 2];
  Py_ssize_t given = num - 1;
  for (Py_ssize_t i = 0; i < given; i++)
    if (!fill(&slots[i], args[1 + i])) return NULL;
  slots[given] = slots[given + 1] = 0; /* Triton's two scratch pointers, which our kernels do not use */
  for (Py_ssize_t i = 0; i < given + 2; i++) params[i] = &slots[i];
  if (!x || !y) Py_RETURN_NONE;
  void *current = NULL, *popped;
  Result code;
  Py_BEGIN_ALLOW_THREADS;
  cuCtxGetCurrent(&current);
  if (current != handle->context) cuCtxPushCurrent(handle->context);
  if (handle->cooperative)
    code = cuLaunchCooperativeKernel(handle->function, x, y, 1, handle->threads, 1, 1, handle->shared, stream, params);
  else if (made->dependent && cuLaunchKernelEx)
    code = launch_dependent(made, stream, params);
  else
    code = cuLaunchKernel(handle->function, x, y, 1, handle->threads, 1, 1, handle->shared, stream, params, NULL);
  if (current != handle->context) cuCtxPopCurrent(&popped);
  Py_END_ALLOW_THREADS;
  if (failed(code, "cuLaunchKernel")) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, "load(device, cubin, name, threads, shared, cooperative) -> (handle, registers, local)"},
    {"plan", plan, METH_VARARGS, "plan(handle, device, grid_x, grid_y, dependent, stream_of) -> plan"},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(plan, *arguments)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ridgeline_launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ridgeline_launcher(void) {
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  if (!data_ptr_name) return NULL;
  return PyModule_Create(&definition);
}
