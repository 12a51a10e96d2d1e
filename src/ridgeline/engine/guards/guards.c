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
    (*sizes_of)(void *, int64_t **), (*strides_of)(void *, int64_t **), (*device_type_of)(void *, int32_t *),
    (*device_of)(void *, int32_t *), (*layout_of)(void *, int32_t *);
static int32_t strided;
static PyObject *tensor_type, *parameter_type, *is_neg, *glance_type;
static Py_ssize_t cdata_at; /* where a Python tensor holds its implementation, in bytes; zero: not known */

typedef struct {
  PyObject *object; /* the tensor, or a weak reference to it */
  void *impl, *data, *storage; /* the last to be fetched early, and never asked */
  int32_t type, dim;
  Py_ssize_t shape; /* where its sizes and strides begin */
  int64_t span;     /* bytes from its first element to the end of its last */
} Look;
typedef struct {
  PyObject *holder, *key, *value; /* holder[key] is value, or where key is type or vars, key(holder) is */
  Py_ssize_t index; /* of an item of a list; -1: of no list; -2: the class of an object; -3: its attributes */
} Name;
typedef struct {
  PyObject *question, *answer; /* what a function without arguments answers, or a set and its copy */
} Ask;
typedef struct {
  PyObject_HEAD
  Py_ssize_t num, num_names, num_lists, list_size, num_asks;
  int weak;
  Look *looks;
  Name *names;
  Ask *asks;
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
    __builtin_prefetch(self->looks[i].storage);
    __builtin_prefetch((char *)self->looks[i].storage + 64);
  }
}

static PyObject *tensor_of(Glance *self, Look *look) {
  return self->weak ? PyWeakref_GetObject(look->object) : look->object;
}

/* Whether a tensor is the one it was, with the implementation it had: only then may that be asked. */
static int is_known(Glance *self, Look *look, PyObject *tensor) {
  return tensor && tensor != Py_None && impl_of(tensor) == look->impl;
}

static int is_named(Name *name) {
  PyObject *now;
  if (name->index == -2) return (PyObject *)Py_TYPE(name->holder) == name->value;
  if (name->index == -3) {
    now = PyObject_GenericGetDict(name->holder, NULL);
    if (!now) return -1;
    Py_DECREF(now);
    return now == name->value;
  }
  if (name->index >= 0) return name->index < PyList_Size(name->holder) && PyList_GetItem(name->holder, name->index) == name->value;
  if (PyDict_CheckExact(name->holder)) {
    now = PyDict_GetItemWithError(name->holder, name->key);
    return now ? now == name->value : PyErr_Occurred() ? -1 : 0;
  }
  now = PyObject_GetItem(name->holder, name->key); /* what a class holds, behind a view of it */
  if (!now) return PyErr_ExceptionMatches(PyExc_LookupError) ? (PyErr_Clear(), 0) : -1;
  Py_DECREF(now);
  return now == name->value;
}

static int is_answered(Ask *ask) {
  if (!PyCallable_Check(ask->question)) return PyObject_RichCompareBool(ask->question, ask->answer, Py_EQ);
  PyObject *now = PyObject_CallNoArgs(ask->question);
  if (!now) return -1;
  int found = PyObject_RichCompareBool(now, ask->answer, Py_EQ);
  Py_DECREF(now);
  return found;
}

static int named(Glance *self) {
  Py_ssize_t size = 0;
  int found = 1;
  for (Py_ssize_t i = 0; i < self->num_lists; i++) size += PyList_Size(self->lists[i]);
  if (size != self->list_size) return 0;
  for (Py_ssize_t i = 0; found == 1 && i < self->num_names; i++) found = is_named(&self->names[i]);
  for (Py_ssize_t i = 0; found == 1 && i < self->num_asks; i++) found = is_answered(&self->asks[i]);
  return found;
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

static int64_t span_of(int64_t dim, const int64_t *sizes, const int64_t *strides) {
  int64_t last = 0;
  for (int64_t i = 0; i < dim; i++) {
    if (!sizes[i]) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
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
  PyObject *itemsize = PyObject_GetAttrString(tensor, "itemsize");
  int64_t bytes = itemsize ? PyLong_AsLongLong(itemsize) : 0;
  Py_XDECREF(itemsize);
  if (PyErr_Occurred()) return -1;
  PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
  cdata = storage ? PyObject_GetAttrString(storage, "_cdata") : NULL;
  look->storage = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
  Py_XDECREF(storage);
  Py_XDECREF(cdata);
  if (PyErr_Occurred()) return -1;
  look->span = span_of(dim, sizes, strides) * bytes;
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

/* Rows of (holder, key, value): a list and a number, a mapping and a key, or an object and ``type`` or ``vars``. */
static int remember_names(Glance *self, PyObject *rows) {
  Py_ssize_t num = PyList_Size(rows);
  self->names = calloc((size_t)num + 1, sizeof(Name));
  if (!self->names) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *holder, *key, *value;
    if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "OOO", &holder, &key, &value)) return -1;
    Name *name = &self->names[i];
    name->index = key == (PyObject *)&PyType_Type ? -2 : PyCFunction_Check(key) ? -3
                  : PyList_Check(holder) ? PyLong_AsSsize_t(key) : -1;
    if (PyErr_Occurred()) return -1;
    name->holder = Py_NewRef(holder);
    name->key = Py_NewRef(key);
    name->value = Py_NewRef(value);
    self->num_names++;
  }
  return 0;
}

/* Rows of (question, answer). */
static int remember_asks(Glance *self, PyObject *rows) {
  Py_ssize_t num = PyList_Size(rows);
  self->asks = calloc((size_t)num + 1, sizeof(Ask));
  if (!self->asks) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *question, *answer;
    if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "OO", &question, &answer)) return -1;
    self->asks[i].question = Py_NewRef(question);
    self->asks[i].answer = Py_NewRef(answer);
    self->num_asks++;
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

/* Glance(tensors, weak, names, lists, asks) */
static PyObject *made(PyTypeObject *type, PyObject *args, PyObject *unused) {
  PyObject *tensors, *names, *lists, *asks;
  int weak;
  if (!PyArg_ParseTuple(args, "O!pO!O!O!", &PyList_Type, &tensors, &weak, &PyList_Type, &names, &PyList_Type, &lists,
                        &PyList_Type, &asks))
    return NULL;
  if (!cdata_at) return PyErr_SetString(PyExc_ValueError, "nobody has said where a tensor is"), NULL;
  allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Glance *self = (Glance *)alloc(type, 0);
  if (!self) return NULL;
  self->weak = weak;
  if (remember_tensors(self, tensors) || remember_names(self, names) || remember_lists(self, lists) ||
      remember_asks(self, asks)) {
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
  for (Py_ssize_t i = 0; i < self->num_asks; i++) {
    Py_VISIT(self->asks[i].question);
    Py_VISIT(self->asks[i].answer);
  }
  return 0;
}

static int cleared(PyObject *object) {
  Glance *self = (Glance *)object;
  Py_ssize_t num = self->num, num_lists = self->num_lists, num_names = self->num_names, num_asks = self->num_asks;
  self->num = self->num_lists = self->num_names = self->num_asks = 0;
  for (Py_ssize_t i = 0; i < num; i++) Py_CLEAR(self->looks[i].object);
  for (Py_ssize_t i = 0; i < num_lists; i++) Py_CLEAR(self->lists[i]);
  for (Py_ssize_t i = 0; i < num_names; i++) {
    Py_CLEAR(self->names[i].holder);
    Py_CLEAR(self->names[i].key);
    Py_CLEAR(self->names[i].value);
  }
  for (Py_ssize_t i = 0; i < num_asks; i++) {
    Py_CLEAR(self->asks[i].question);
    Py_CLEAR(self->asks[i].answer);
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
  free(self->asks);
  free(self->lists);
  free(self->shapes);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* --- a whole call -------------------------------------------------------------------------------------------------*/

enum { TENSOR, PLAIN, PIECE };
typedef struct {
  int kind;
  PyObject *value; /* what a plain argument is; a weak reference to an object whose tensors are known */
  int32_t device_type, device;
} Row;
typedef struct {
  PyObject_HEAD
  Py_ssize_t num, num_args, num_items;
  Row *rows;
  PyObject *names, *forms, *piece, *items; /* forms: a glance at the tensors of the first call; items: lists */
  void **item;
} Call;

static int is_tensor(PyObject *value) {
  PyObject *type = (PyObject *)Py_TYPE(value);
  return type == tensor_type || type == parameter_type;
}

static int is_alike(Call *self, Row *row, Py_ssize_t at, PyObject *value) {
  Glance *forms = (Glance *)self->forms;
  Look look = forms->looks[at];
  int32_t device_type, device, layout;
  if (!is_tensor(value)) return 0;
  look.impl = impl_of(value);
  if (layout_of(&look.impl, &layout) || layout != strided || unlike(&look, forms->shapes + look.shape) || device_type_of(&look.impl, &device_type) ||
      device_of(&look.impl, &device) || device_type != row->device_type || device != row->device)
    return 0;
  PyObject *negated = PyObject_CallFunctionObjArgs(is_neg, value, NULL);
  if (!negated) return -1;
  Py_DECREF(negated);
  return negated == Py_False;
}

static int is_value(Row *row, PyObject *value) {
  if (value == row->value) return 1;
  if (Py_TYPE(value) != Py_TYPE(row->value) || PyFloat_Check(value)) return 0;
  return PyObject_RichCompareBool(value, row->value, Py_EQ);
}

/* The tensors of an object that is the one it was and holds in its lists what it held. */
static int take_piece(Call *self, Row *row, PyObject *value, PyObject *found) {
  if (PyWeakref_GetObject(row->value) != value) return 0;
  Py_ssize_t at = 0, num = PyList_Size(self->items);
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *list = PyList_GetItem(self->items, i);
    Py_ssize_t size = PyList_Size(list);
    if (at + size + 1 > self->num_items || self->item[at++] != (void *)size) return 0;
    for (Py_ssize_t j = 0; j < size; j++)
      if (PyList_GetItem(list, j) != self->item[at++]) return 0;
  }
  PyObject *tensors = at == self->num_items ? held(self->piece, NULL) : Py_NewRef(Py_None);
  if (!tensors) return -1;
  int known = tensors != Py_None;
  Py_ssize_t end = PyList_Size(found);
  if (known && PyList_SetSlice(found, end, end, tensors)) known = -1;
  Py_DECREF(tensors);
  return known;
}

static int take_value(Call *self, Py_ssize_t i, Py_ssize_t *seen, PyObject *value, PyObject *found) {
  Row *row = &self->rows[i];
  if (row->kind == PLAIN) return is_value(row, value);
  if (row->kind == PIECE) return take_piece(self, row, value, found);
  int alike = is_alike(self, row, (*seen)++, value);
  return alike == 1 && PyList_Append(found, value) ? -1 : alike;
}

static int take_all(Call *self, PyObject *args, PyObject *kwargs, PyObject *found) {
  Py_ssize_t seen = 0, at = 0, i = self->num_args;
  PyObject *name, *value;
  for (Py_ssize_t j = 0; j < i; j++) {
    int fits = take_value(self, j, &seen, PyTuple_GetItem(args, j), found);
    if (fits != 1) return fits;
  }
  while (PyDict_Next(kwargs, &at, &name, &value)) {
    PyObject *wanted = PyTuple_GetItem(self->names, i - self->num_args);
    int fits = name == wanted ? 1 : PyObject_RichCompareBool(name, wanted, Py_EQ);
    if (fits == 1) fits = take_value(self, i++, &seen, value, found);
    if (fits != 1) return fits;
  }
  return 1;
}

/* take(args, kwargs): the tensors of a call that looks like the first one; None of any other. */
static PyObject *take(PyObject *object, PyObject *given) {
  Call *self = (Call *)object;
  PyObject *args, *kwargs;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs)) return NULL;
  if (PyTuple_Size(args) != self->num_args || PyDict_Size(kwargs) != self->num - self->num_args) Py_RETURN_NONE;
  PyObject *found = PyList_New(0);
  int fits = found ? take_all(self, args, kwargs, found) : -1;
  if (fits == 1) return found;
  Py_XDECREF(found);
  if (fits < 0) return NULL;
  Py_RETURN_NONE;
}

static int overlaps(const char *a, int64_t a_span, const char *b, int64_t b_span) {
  return a_span && b_span && a < b + b_span && b < a + a_span;
}

/* apart(tensors, spans, free, model): whether those that are counted share no memory with others or with the model. */
static PyObject *apart(PyObject *module, PyObject *args) {
  PyObject *tensors, *model;
  const char *spans, *free_;
  Py_ssize_t num_bytes, num;
  if (!PyArg_ParseTuple(args, "O!y#y#O", &PyList_Type, &tensors, &spans, &num_bytes, &free_, &num, &model)) return NULL;
  if ((PyObject *)Py_TYPE(model) != glance_type) return PyErr_SetString(PyExc_TypeError, "this is no glance"), NULL;
  Glance *known = (Glance *)model;
  Py_ssize_t size = PyList_Size(tensors);
  if (size * 8 != num_bytes) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < num / 8; i++) {
    int64_t at, span, other;
    memcpy(&at, free_ + 8 * i, 8);
    if (at < 0 || at >= size) Py_RETURN_FALSE;
    memcpy(&span, spans + 8 * at, 8);
    void *impl = impl_of(PyList_GetItem(tensors, at)), *mine, *theirs;
    if (data_of(&impl, &mine)) Py_RETURN_FALSE;
    for (Py_ssize_t j = 0; j < known->num; j++)
      if (overlaps(mine, span, known->looks[j].data, known->looks[j].span)) Py_RETURN_FALSE;
    for (Py_ssize_t j = 0; j < size; j++) {
      if (j == at) continue;
      memcpy(&other, spans + 8 * j, 8);
      impl = impl_of(PyList_GetItem(tensors, j));
      if (data_of(&impl, &theirs) || overlaps(mine, span, theirs, other)) Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

static int remember_items(Call *self) {
  Py_ssize_t num = PyList_Size(self->items), total = 0;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *list = PyList_GetItem(self->items, i);
    if (!PyList_Check(list)) return PyErr_SetString(PyExc_TypeError, "a list"), -1;
    total += 1 + PyList_Size(list);
  }
  self->item = calloc((size_t)total + 1, sizeof(void *));
  if (!self->item) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *list = PyList_GetItem(self->items, i);
    self->item[self->num_items++] = (void *)PyList_Size(list);
    for (Py_ssize_t j = 0; j < PyList_Size(list); j++) self->item[self->num_items++] = PyList_GetItem(list, j);
  }
  return 0;
}

static int remember_rows(Call *self, PyObject *rows) {
  Py_ssize_t num = PyList_Size(rows), seen = 0;
  Glance *forms = (Glance *)self->forms;
  self->rows = calloc((size_t)num + 1, sizeof(Row));
  if (!self->rows) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject *value;
    Row *row = &self->rows[i];
    if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "iO", &row->kind, &value)) return -1;
    row->value = Py_NewRef(value);
    self->num++;
    if (row->kind != TENSOR) continue;
    if (seen >= forms->num) return PyErr_SetString(PyExc_ValueError, "fewer forms than tensors"), -1;
    Look *look = &forms->looks[seen++];
    if (device_type_of(&look->impl, &row->device_type) || device_of(&look->impl, &row->device))
      return PyErr_SetString(PyExc_ValueError, "a tensor without a device"), -1;
  }
  return 0;
}

/* Call(number of positional arguments, names, rows, forms, piece, items): piece is a glance, or None. */
static PyObject *made_call(PyTypeObject *type, PyObject *args, PyObject *unused) {
  PyObject *names, *rows, *forms, *piece, *items;
  Py_ssize_t num_args;
  if (!PyArg_ParseTuple(args, "nO!O!OOO!", &num_args, &PyTuple_Type, &names, &PyList_Type, &rows, &forms, &piece,
                        &PyList_Type, &items))
    return NULL;
  if (!glance_type || (PyObject *)Py_TYPE(forms) != glance_type ||
      (piece != Py_None && (PyObject *)Py_TYPE(piece) != glance_type) ||
      num_args + PyTuple_Size(names) != PyList_Size(rows))
    return PyErr_SetString(PyExc_TypeError, "these are no glances"), NULL;
  allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Call *self = (Call *)alloc(type, 0);
  if (!self) return NULL;
  self->num_args = num_args;
  self->names = Py_NewRef(names);
  self->forms = Py_NewRef(forms);
  self->piece = Py_NewRef(piece);
  self->items = Py_NewRef(items);
  if (remember_rows(self, rows) || remember_items(self)) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static int visited_call(PyObject *object, visitproc visit, void *arg) {
  Call *self = (Call *)object;
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t i = 0; i < self->num; i++) Py_VISIT(self->rows[i].value);
  Py_VISIT(self->names);
  Py_VISIT(self->forms);
  Py_VISIT(self->piece);
  Py_VISIT(self->items);
  return 0;
}

static int cleared_call(PyObject *object) {
  Call *self = (Call *)object;
  Py_ssize_t num = self->num;
  self->num = 0;
  for (Py_ssize_t i = 0; i < num; i++) Py_CLEAR(self->rows[i].value);
  Py_CLEAR(self->names);
  Py_CLEAR(self->forms);
  Py_CLEAR(self->piece);
  Py_CLEAR(self->items);
  return 0;
}

static void freed_call(PyObject *object) {
  Call *self = (Call *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  cleared_call(object);
  free(self->rows);
  free(self->item);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* opened(offset, Tensor, Parameter): finds PyTorch's functions, is told where a tensor is; whether all were found. */
static PyObject *opened(PyObject *module, PyObject *args) {
  PyObject *tensor, *parameter;
  Py_ssize_t at;
  if (!PyArg_ParseTuple(args, "nOO", &at, &tensor, &parameter)) return NULL;
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) Py_RETURN_FALSE;
  data_of = (int (*)(void *, void **))dlsym(torch, "aoti_torch_get_data_ptr");
  type_of = (int (*)(void *, int32_t *))dlsym(torch, "aoti_torch_get_dtype");
  dim_of = (int (*)(void *, int64_t *))dlsym(torch, "aoti_torch_get_dim");
  sizes_of = (int (*)(void *, int64_t **))dlsym(torch, "aoti_torch_get_sizes");
  strides_of = (int (*)(void *, int64_t **))dlsym(torch, "aoti_torch_get_strides");
  device_type_of = (int (*)(void *, int32_t *))dlsym(torch, "aoti_torch_get_device_type");
  device_of = (int (*)(void *, int32_t *))dlsym(torch, "aoti_torch_get_device_index");
  layout_of = (int (*)(void *, int32_t *))dlsym(torch, "aoti_torch_get_layout");
  int32_t (*plain)(void) = (int32_t(*)(void))dlsym(torch, "aoti_torch_layout_strided");
  if (!data_of || !type_of || !dim_of || !sizes_of || !strides_of || !device_type_of || !device_of || !layout_of || !plain)
    Py_RETURN_FALSE;
  strided = plain();
  is_neg = PyObject_GetAttrString(tensor, "is_neg");
  if (!is_neg) return NULL;
  tensor_type = Py_NewRef(tensor);
  parameter_type = Py_NewRef(parameter);
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
static PyMethodDef call_methods[] = {
    {"take", take, METH_VARARGS, "take(args, kwargs): the tensors of a call like the first; else None"},
    {NULL, NULL, 0, NULL}};
static PyType_Slot call_slots[] = {{Py_tp_new, made_call},      {Py_tp_dealloc, freed_call}, {Py_tp_traverse, visited_call},
                                   {Py_tp_clear, cleared_call}, {Py_tp_methods, call_methods}, {0, NULL}};
static PyType_Spec call_spec = {"ridgeline_glance.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                call_slots};
static PyMethodDef module_methods[] = {
    {"opened", opened, METH_VARARGS, "opened(offset, Tensor, Parameter): whether PyTorch's functions were found"},
    {"lie_at", lie_at, METH_VARARGS, "lie_at(tensors, addresses, indices)"},
    {"apart", apart, METH_VARARGS, "apart(tensors, spans, free, model)"},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ridgeline_glance", NULL, -1, module_methods};

PyMODINIT_FUNC PyInit_ridgeline_glance(void) {
  PyObject *module = PyModule_Create(&definition), *call = PyType_FromSpec(&call_spec);
  glance_type = PyType_FromSpec(&spec);
  if (!module || !call || !glance_type || PyModule_AddObjectRef(module, "Glance", glance_type) ||
      PyModule_AddObjectRef(module, "Call", call))
    return NULL;
  return module;
}
