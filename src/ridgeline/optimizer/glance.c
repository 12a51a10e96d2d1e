/* One look at many tensors: whether each is the object it was, of the type, sizes and strides it had, where it lay.

   A recorded call must know this before it starts, and finds the caches cold when it has waited for the device: asked
   one by one from Python, four hundred tensors take a third of a millisecond then, almost all of it spent waiting for
   one pointer after the other. Here the memory of all of them is asked for at once. Built against Python's stable ABI
   without PyTorch's headers: a tensor's implementation is the word of the Python object that Python itself calls
   _cdata (found and checked from Python), and is asked through PyTorch's C functions for compiled code. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIMS 12

/* Each takes the address of a tensor handle, which is one pointer, and answers zero where all is well. */
static int (*data_of)(void *, void **), (*type_of)(void *, int32_t *), (*dim_of)(void *, int64_t *),
    (*sizes_of)(void *, int64_t **), (*strides_of)(void *, int64_t **);
static Py_ssize_t cdata_at; /* where a Python tensor holds its implementation, in bytes; zero: not known */

typedef struct {
  PyObject *object; /* the tensor, or a weak reference to it */
  void *impl, *data;
  int32_t type, dim;
  Py_ssize_t shape; /* where its sizes and strides begin */
} Look;
typedef struct {
  PyObject *holder, *key, *value; /* holder[key] is value; in a list the key is a number */
  Py_ssize_t index;
} Name;
typedef struct {
  PyObject_HEAD
  Py_ssize_t num, num_names, num_lists, list_size;
  int weak;
  Look *looks;
  Name *names;
  PyObject **lists;
  int64_t *shapes;
} Glance;

static void *impl_of(PyObject *tensor) { return *(void **)((char *)tensor + cdata_at); }

static int unlike(Look *look, const int64_t *shape) {
  int32_t type;
  int64_t dim, *sizes, *strides;
  if (type_of(&look->impl, &type) || type != look->type || dim_of(&look->impl, &dim) || dim != look->dim) return 1;
  if (sizes_of(&look->impl, &sizes) || strides_of(&look->impl, &strides)) return 1;
  for (int64_t i = 0; i < dim; i++)
    if (sizes[i] != shape[i] || strides[i] != shape[dim + i]) return 1;
  return 0;
}

/* Every object first, then what they point at: waits for memory run side by side. */
static void fetch_objects(Glance *self) {
  for (Py_ssize_t i = 0; i < self->num; i++) {
    __builtin_prefetch(self->looks[i].object);
    char *impl = self->looks[i].impl;
    __builtin_prefetch(impl);
    __builtin_prefetch(impl + 64);
    __builtin_prefetch(impl + 128);
  }
}

static PyObject *tensor_of(Glance *self, Look *look) {
  return self->weak ? PyWeakref_GetObject(look->object) : look->object;
}

/* Whether a tensor is the one it was, with the implementation it had: only then may that be asked. */
static int is_known(Glance *self, Look *look, PyObject *tensor) {
  return tensor && tensor != Py_None && impl_of(tensor) == look->impl;
}

static int named(Glance *self) {
  Py_ssize_t size = 0;
  for (Py_ssize_t i = 0; i < self->num_lists; i++) size += PyList_Size(self->lists[i]);
  if (size != self->list_size) return 0;
  for (Py_ssize_t i = 0; i < self->num_names; i++) {
    Name *name = &self->names[i];
    PyObject *now = name->key ? PyDict_GetItemWithError(name->holder, name->key)
                              : name->index < PyList_Size(name->holder) ? PyList_GetItem(name->holder, name->index) : NULL;
    if (now != name->value) return PyErr_Occurred() ? -1 : 0;
  }
  return 1;
}

/* same(): whether every tensor is the one it was, alike, where it lay, and every name stands for what it stood for. */
static PyObject *same(PyObject *object, PyObject *unused) {
  Glance *self = (Glance *)object;
  fetch_objects(self);
  for (Py_ssize_t i = 0; i < self->num; i++) {
    Look *look = &self->looks[i];
    void *data;
    if (!is_known(self, look, tensor_of(self, look)) || data_of(&look->impl, &data) || data != look->data ||
        unlike(look, self->shapes + look->shape))
      Py_RETURN_FALSE;
  }
  int found = named(self);
  return found < 0 ? NULL : PyBool_FromLong(found);
}

/* held(): the tensors, if each is there and alike, wherever it lies; None otherwise. */
static PyObject *held(PyObject *object, PyObject *unused) {
  Glance *self = (Glance *)object;
  fetch_objects(self);
  PyObject *found = PyList_New(self->num);
  if (!found) return NULL;
  for (Py_ssize_t i = 0; i < self->num; i++) {
    Look *look = &self->looks[i];
    PyObject *tensor = tensor_of(self, look);
    if (!is_known(self, look, tensor) || unlike(look, self->shapes + look->shape)) {
      Py_DECREF(found);
      Py_RETURN_NONE;
    }
    PyList_SetItem(found, i, Py_NewRef(tensor));
  }
  return found;
}

/* lie_at(tensors, addresses, indices): whether those that are counted lie at their addresses; all are plain tensors. */
static PyObject *lie_at(PyObject *module, PyObject *args) {
  PyObject *tensors;
  const char *addresses, *indices;
  Py_ssize_t num_bytes, num;
  if (!PyArg_ParseTuple(args, "O!y#y#", &PyList_Type, &tensors, &addresses, &num_bytes, &indices, &num)) return NULL;
  Py_ssize_t most = PyList_Size(tensors);
  for (Py_ssize_t i = 0; i < num / 8; i++) {
    int64_t at;
    uint64_t wanted;
    memcpy(&at, indices + 8 * i, 8);
    if (at < 0 || at >= most || 8 * at >= num_bytes) Py_RETURN_FALSE;
    memcpy(&wanted, addresses + 8 * at, 8);
    void *impl = impl_of(PyList_GetItem(tensors, at)), *data;
    if (data_of(&impl, &data) || (uint64_t)(uintptr_t)data != wanted) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

static int remember(Glance *self, Look *look, PyObject *tensor, Py_ssize_t *at) {
  int64_t dim, *sizes, *strides;
  look->impl = impl_of(tensor);
  PyObject *cdata = PyObject_GetAttrString(tensor, "_cdata");
  void *said = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
  Py_XDECREF(cdata);
  if (PyErr_Occurred()) return -1;
  if (said != look->impl || data_of(&look->impl, &look->data) || type_of(&look->impl, &look->type) ||
      dim_of(&look->impl, &dim) || dim > MAX_DIMS || sizes_of(&look->impl, &sizes) || strides_of(&look->impl, &strides)) {
    PyErr_SetString(PyExc_ValueError, "a tensor that cannot be looked at");
    return -1;
  }
  look->dim = (int32_t)dim;
  look->shape = *at;
  memcpy(self->shapes + *at, sizes, 8 * (size_t)dim);
  memcpy(self->shapes + *at + dim, strides, 8 * (size_t)dim);
  *at += 2 * dim;
  return 0;
}

static int remember_tensors(Glance *self, PyObject *tensors) {
  Py_ssize_t num = PyList_Size(tensors), at = 0;
  self->looks = calloc((size_t)num + 1, sizeof(Look));
  self->shapes = calloc((size_t)num + 1, 2 * MAX_DIMS * sizeof(int64_t));
  if (!self->looks || !self->shapes) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *tensor = PyList_GetItem(tensors, i);
    PyObject *kept = self->weak ? PyWeakref_NewRef(tensor, NULL) : Py_NewRef(tensor);
    if (!kept) return -1;
    self->looks[self->num++].object = kept;
    if (remember(self, &self->looks[i], tensor, &at)) return -1;
  }
  int64_t *less = realloc(self->shapes, (size_t)(at + 1) * sizeof(int64_t));
  if (less) self->shapes = less;
  return 0;
}

/* Rows of (holder, key, value): a dictionary and a key, or a list and a number. */
static int remember_names(Glance *self, PyObject *rows) {
  Py_ssize_t num = PyList_Size(rows);
  self->names = calloc((size_t)num + 1, sizeof(Name));
  if (!self->names) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *holder, *key, *value;
    if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "OOO", &holder, &key, &value)) return -1;
    Name *name = &self->names[i];
    int listed = PyList_Check(holder);
    if (listed) name->index = PyLong_AsSsize_t(key);
    else if (!PyDict_Check(holder)) PyErr_SetString(PyExc_TypeError, "a dictionary or a list");
    if (PyErr_Occurred()) return -1;
    name->holder = Py_NewRef(holder);
    name->key = listed ? NULL : Py_NewRef(key);
    name->value = Py_NewRef(value);
    self->num_names++;
  }
  return 0;
}

static int remember_lists(Glance *self, PyObject *lists) {
  Py_ssize_t num = PyList_Size(lists);
  self->lists = calloc((size_t)num + 1, sizeof(PyObject *));
  if (!self->lists) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *one = PyList_GetItem(lists, i);
    if (!PyList_Check(one)) return PyErr_SetString(PyExc_TypeError, "a list"), -1;
    self->lists[self->num_lists++] = Py_NewRef(one);
    self->list_size += PyList_Size(one);
  }
  return 0;
}

/* Glance(tensors, weak, names, lists) */
static PyObject *made(PyTypeObject *type, PyObject *args, PyObject *unused) {
  PyObject *tensors, *names, *lists;
  int weak;
  if (!PyArg_ParseTuple(args, "O!pO!O!", &PyList_Type, &tensors, &weak, &PyList_Type, &names, &PyList_Type, &lists))
    return NULL;
  if (!cdata_at) return PyErr_SetString(PyExc_ValueError, "nobody has said where a tensor is"), NULL;
  allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Glance *self = (Glance *)alloc(type, 0);
  if (!self) return NULL;
  self->weak = weak;
  if (remember_tensors(self, tensors) || remember_names(self, names) || remember_lists(self, lists)) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static int visited(PyObject *object, visitproc visit, void *arg) {
  Glance *self = (Glance *)object;
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t i = 0; i < self->num; i++) Py_VISIT(self->looks[i].object);
  for (Py_ssize_t i = 0; i < self->num_lists; i++) Py_VISIT(self->lists[i]);
  for (Py_ssize_t i = 0; i < self->num_names; i++) {
    Py_VISIT(self->names[i].holder);
    Py_VISIT(self->names[i].key);
    Py_VISIT(self->names[i].value);
  }
  return 0;
}

static int cleared(PyObject *object) {
  Glance *self = (Glance *)object;
  Py_ssize_t num = self->num, num_lists = self->num_lists, num_names = self->num_names;
  self->num = self->num_lists = self->num_names = 0;
  for (Py_ssize_t i = 0; i < num; i++) Py_CLEAR(self->looks[i].object);
  for (Py_ssize_t i = 0; i < num_lists; i++) Py_CLEAR(self->lists[i]);
  for (Py_ssize_t i = 0; i < num_names; i++) {
    Py_CLEAR(self->names[i].holder);
    Py_CLEAR(self->names[i].key);
    Py_CLEAR(self->names[i].value);
  }
  return 0;
}

static void freed(PyObject *object) {
  Glance *self = (Glance *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  cleared(object);
  free(self->looks);
  free(self->names);
  free(self->lists);
  free(self->shapes);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* opened(offset): finds PyTorch's functions, and is told where a tensor is; whether all were found. */
static PyObject *opened(PyObject *module, PyObject *offset) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  Py_ssize_t at = PyLong_AsSsize_t(offset);
  if (PyErr_Occurred()) return NULL;
  if (!torch) Py_RETURN_FALSE;
  data_of = (int (*)(void *, void **))dlsym(torch, "aoti_torch_get_data_ptr");
  type_of = (int (*)(void *, int32_t *))dlsym(torch, "aoti_torch_get_dtype");
  dim_of = (int (*)(void *, int64_t *))dlsym(torch, "aoti_torch_get_dim");
  sizes_of = (int (*)(void *, int64_t **))dlsym(torch, "aoti_torch_get_sizes");
  strides_of = (int (*)(void *, int64_t **))dlsym(torch, "aoti_torch_get_strides");
  if (!data_of || !type_of || !dim_of || !sizes_of || !strides_of) Py_RETURN_FALSE;
  cdata_at = at;
  Py_RETURN_TRUE;
}

static PyMethodDef glance_methods[] = {
    {"same", same, METH_NOARGS, "same(): whether nothing has changed"},
    {"held", held, METH_NOARGS, "held(): the tensors, if they are there and alike; else None"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, made},           {Py_tp_dealloc, freed}, {Py_tp_traverse, visited},
                              {Py_tp_clear, cleared},      {Py_tp_methods, glance_methods}, {0, NULL}};
static PyType_Spec spec = {"ridgeline_glance.Glance", sizeof(Glance), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
static PyMethodDef module_methods[] = {
    {"opened", opened, METH_O, "opened(offset): whether PyTorch's functions were found"},
    {"lie_at", lie_at, METH_VARARGS, "lie_at(tensors, addresses, indices)"},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ridgeline_glance", NULL, -1, module_methods};

PyMODINIT_FUNC PyInit_ridgeline_glance(void) {
  PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
  if (!module || !type || PyModule_AddObject(module, "Glance", type)) return NULL;
  return module;
}
