/* Runs an engine with the CUDA driver alone. The tables above say which kernels are launched, over which arguments.

   One file, no dependency but libc and libdl: the driver is opened when the engine is. All weights, all values and the
   pinned buffers of inputs and outputs are allocated once; the steps are captured as a CUDA graph, copies included, so
   that a call is one launch. An engine is used by one thread at a time. */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHUNK_BYTES (8u << 20)
#define COUNT(table) (sizeof(table) / sizeof(*(table)))

typedef int Result;
typedef uint64_t Address;
#define DRIVER(X)                                                                                                      \
  X(cuInit, "cuInit", (unsigned))                                                                                      \
  X(cuDeviceGet, "cuDeviceGet", (int *, int))                                                                          \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                                                   \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **, int))                                              \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int))                                                  \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void *))                                                                 \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void **))                                                                  \
  X(cuMemAlloc, "cuMemAlloc_v2", (Address *, size_t))                                                                  \
  X(cuMemFree, "cuMemFree_v2", (Address))                                                                              \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                     \
  X(cuMemFreeHost, "cuMemFreeHost", (void *))                                                                          \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (Address, const void *, size_t, void *))                                \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, Address, size_t, void *))                                      \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (Address, Address, size_t, void *))                                     \
  X(cuMemsetD8Async, "cuMemsetD8Async", (Address, unsigned char, size_t, void *))                                      \
  X(cuMemsetD16Async, "cuMemsetD16Async", (Address, unsigned short, size_t, void *))                                   \
  X(cuMemsetD32Async, "cuMemsetD32Async", (Address, unsigned, size_t, void *))                                         \
  X(cuStreamCreate, "cuStreamCreate", (void **, unsigned))                                                             \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (void *))                                                                   \
  X(cuStreamSynchronize, "cuStreamSynchronize", (void *))                                                              \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (void *, int))                                                    \
  X(cuStreamEndCapture, "cuStreamEndCapture", (void *, void **))                                                       \
  X(cuEventCreate, "cuEventCreate", (void **, unsigned))                                                               \
  X(cuEventRecord, "cuEventRecord", (void *, void *))                                                                  \
  X(cuEventSynchronize, "cuEventSynchronize", (void *))                                                                \
  X(cuEventDestroy, "cuEventDestroy_v2", (void *))                                                                     \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags", (void **, void *, unsigned long long))                          \
  X(cuGraphLaunch, "cuGraphLaunch", (void *, void *))                                                                  \
  X(cuGraphDestroy, "cuGraphDestroy", (void *))                                                                        \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (void *))                                                                \
  X(cuModuleLoadData, "cuModuleLoadData", (void **, const void *))                                                     \
  X(cuModuleUnload, "cuModuleUnload", (void *))                                                                        \
  X(cuModuleGetFunction, "cuModuleGetFunction", (void **, void *, const char *))                                       \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (void *, int, int))                                                      \
  X(cuLaunchKernel, "cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,   \
                                       void *, void **, void **))                                                      \
  X(cuGetErrorString, "cuGetErrorString", (int, const char **))
#define DECLARE(name, symbol, arguments) static Result(*name) arguments;
DRIVER(DECLARE)

struct ridgeline {
  int device;
  void *context, *stream, *graph, *modules[COUNT(kernels)], *functions[COUNT(kernels)];
  Address weights, arena;
  unsigned char *pinned; /* inputs, then outputs */
  uint64_t values[COUNT(arguments)];
  void *pointers[COUNT(arguments)];
};

static _Thread_local char message[256];

const char *ridgeline_error(void) { return message; }

static int fail(const char *format, ...) {
  va_list given;
  va_start(given, format);
  vsnprintf(message, sizeof message, format, given);
  va_end(given);
  return 1;
}

static int failed(Result code, const char *what) {
  const char *text = NULL;
  if (!code) return 0;
  if (!cuGetErrorString || cuGetErrorString(code, &text)) text = NULL;
  return fail("%s: CUDA error %d%s%s", what, code, text ? ", " : "", text ? text : "");
}

#define TRY(call, what)                                                                                                \
  do {                                                                                                                 \
    if (failed(call, what)) return 1;                                                                                  \
  } while (0)

static int driver(void) {
  static void *library;
  if (library) return 0;
  void *opened = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!opened) return fail("no CUDA driver: %s", dlerror());
#define FIND(name, symbol, arguments)                                                                                  \
  *(void **)&name = dlsym(opened, symbol);                                                                             \
  if (!name) {                                                                                                         \
    dlclose(opened);                                                                                                   \
    return fail("the CUDA driver has no " symbol ": install CUDA 11.4's or a later one");                              \
  }
  DRIVER(FIND)
  library = opened;
  return 0;
}

/* The address that an argument, a copy or a fill names. */
static Address place(const struct ridgeline *of, char region, uint64_t offset) {
  return (region == 'w' ? of->weights : of->arena) + offset;
}

/* Every step once, on the stream: inputs in, kernels, copies and fills, outputs out. */
static int issue(struct ridgeline *of) {
  for (size_t i = 0; i < NUM_INPUTS; i++)
    if (inputs[i].bytes)
      TRY(cuMemcpyHtoDAsync(place(of, inputs[i].region, inputs[i].offset), of->pinned + inputs[i].host,
                            inputs[i].bytes, of->stream), "copying an input");
  for (size_t i = 0; i < NUM_STEPS; i++) {
    const struct step *now = &steps[i];
    if (now->kind == 'k') {
      const struct kernel *what = &kernels[now->kernel];
      TRY(cuLaunchKernel(of->functions[now->kernel], now->grid[0], now->grid[1], now->grid[2], what->threads, 1, 1,
                         what->shared, of->stream, of->pointers + now->first, NULL), what->name);
      continue;
    }
    Address to = place(of, arguments[now->first].kind, arguments[now->first].value);
    if (now->kind == 'c')
      TRY(cuMemcpyDtoDAsync(to, place(of, arguments[now->first + 1].kind, arguments[now->first + 1].value), now->count,
                            of->stream), "a copy");
    else if (now->kind == '1')
      TRY(cuMemsetD8Async(to, (unsigned char)now->bits, now->count, of->stream), "a fill");
    else if (now->kind == '2')
      TRY(cuMemsetD16Async(to, (unsigned short)now->bits, now->count, of->stream), "a fill");
    else
      TRY(cuMemsetD32Async(to, now->bits, now->count, of->stream), "a fill");
  }
  for (size_t i = 0; i < NUM_OUTPUTS; i++)
    if (outputs[i].bytes)
      TRY(cuMemcpyDtoHAsync(of->pinned + outputs[i].host, place(of, outputs[i].region, outputs[i].offset),
                            outputs[i].bytes, of->stream), "copying an output");
  return 0;
}

/* The weights from the file to the device through two pinned chunks: one is read while the other is copied. */
static int upload(struct ridgeline *of, FILE *file) {
  uint64_t total = WEIGHT_BYTES, most = total < CHUNK_BYTES ? total : CHUNK_BYTES;
  unsigned char *chunks = NULL;
  void *done[2] = {NULL, NULL};
  int bad = failed(cuMemHostAlloc((void **)&chunks, 2 * most, 0), "pinned memory");
  for (int i = 0; i < 2 && !bad; i++) bad = failed(cuEventCreate(&done[i], 2), "cuEventCreate");
  for (uint64_t at = 0, turn = 0; at < total && !bad; at += most, turn++) {
    size_t size = total - at < most ? total - at : most;
    unsigned char *chunk = chunks + (turn & 1) * most;
    if (turn > 1) bad = failed(cuEventSynchronize(done[turn & 1]), "waiting for an upload");
    if (!bad && fread(chunk, 1, size, file) != size) bad = fail("the data file ends within the weights");
    if (!bad) bad = failed(cuMemcpyHtoDAsync(of->weights + at, chunk, size, of->stream), "uploading weights");
    if (!bad) bad = failed(cuEventRecord(done[turn & 1], of->stream), "cuEventRecord");
  }
  if (of->stream && failed(cuStreamSynchronize(of->stream), "uploading weights")) bad = 1;
  for (int i = 0; i < 2; i++)
    if (done[i]) cuEventDestroy(done[i]);
  if (chunks) cuMemFreeHost(chunks);
  return bad;
}

static int load_kernels(struct ridgeline *of, FILE *file) {
  unsigned char *code = malloc(CODE_BYTES + 1);
  if (!code) return fail("out of memory");
  int bad = fread(code, 1, CODE_BYTES, file) != CODE_BYTES && fail("the data file ends within the kernels");
  for (size_t i = 0; i < NUM_KERNELS && !bad; i++) {
    bad = failed(cuModuleLoadData(&of->modules[i], code + kernels[i].offset), kernels[i].name) ||
          failed(cuModuleGetFunction(&of->functions[i], of->modules[i], kernels[i].name), kernels[i].name);
    if (!bad && kernels[i].shared > 48u << 10)
      bad = failed(cuFuncSetAttribute(of->functions[i], 8, (int)kernels[i].shared), kernels[i].name);
  }
  free(code);
  return bad;
}

/* Captures the steps as a graph. */
static int capture(struct ridgeline *of) {
  void *graph = NULL;
  TRY(cuStreamBeginCapture(of->stream, 1), "cuStreamBeginCapture");
  int bad = issue(of);
  Result ended = cuStreamEndCapture(of->stream, &graph); /* ends the capture also where a step failed */
  if (!bad) bad = failed(ended, "cuStreamEndCapture");
  if (!bad) bad = failed(cuGraphInstantiate(&of->graph, graph, 0), "cuGraphInstantiate");
  if (graph) cuGraphDestroy(graph);
  return bad;
}

static int prepare(struct ridgeline *of, FILE *file) {
  TRY(cuStreamCreate(&of->stream, 1), "cuStreamCreate");
  if (WEIGHT_BYTES) TRY(cuMemAlloc(&of->weights, WEIGHT_BYTES), "memory for the weights");
  if (ARENA_BYTES) TRY(cuMemAlloc(&of->arena, ARENA_BYTES), "memory for the values");
  if (PINNED_BYTES) TRY(cuMemHostAlloc((void **)&of->pinned, PINNED_BYTES, 0), "pinned memory");
  if ((WEIGHT_BYTES && upload(of, file)) || load_kernels(of, file)) return 1;
  for (size_t i = 0; i < COUNT(arguments); i++) {
    of->values[i] = arguments[i].kind == 's' ? arguments[i].value : place(of, arguments[i].kind, arguments[i].value);
    of->pointers[i] = &of->values[i];
  }
  if (issue(of)) return 1; /* once without a graph: a step that fails is named, and lazy loading is done */
  TRY(cuStreamSynchronize(of->stream), "the first run");
  return capture(of);
}

void ridgeline_close(struct ridgeline *of) {
  void *popped;
  if (!of) return;
  if (of->context && !cuCtxPushCurrent(of->context)) {
    if (of->stream) cuStreamSynchronize(of->stream);
    if (of->graph) cuGraphExecDestroy(of->graph);
    for (size_t i = 0; i < NUM_KERNELS; i++)
      if (of->modules[i]) cuModuleUnload(of->modules[i]);
    if (of->pinned) cuMemFreeHost(of->pinned);
    if (of->arena) cuMemFree(of->arena);
    if (of->weights) cuMemFree(of->weights);
    if (of->stream) cuStreamDestroy(of->stream);
    cuCtxPopCurrent(&popped);
  }
  if (of->context) cuDevicePrimaryCtxRelease(of->device);
  free(of);
}

/* Opens the data file on a device; 0, or 1 with the reason in ridgeline_error(). */
int ridgeline_open(const char *path, int device, struct ridgeline **made) {
  unsigned char head[64];
  int major = 0, minor = 0, bad;
  void *popped;
  *made = NULL;
  FILE *file = fopen(path, "rb");
  if (!file) return fail("cannot read %s: %s", path, strerror(errno));
  struct ridgeline *of = calloc(1, sizeof *of);
  bad = !of && fail("out of memory");
  if (!bad && (fread(head, 1, sizeof head, file) != sizeof head || memcmp(head, "RIDGECU1" DIGEST, 40)))
    bad = fail("%s does not belong to this source: export both again", path);
  bad = bad || driver() || failed(cuInit(0), "cuInit") || failed(cuDeviceGet(&of->device, device), "cuDeviceGet") ||
        failed(cuDeviceGetAttribute(&major, 75, of->device), "compute capability") ||
        failed(cuDeviceGetAttribute(&minor, 76, of->device), "compute capability");
  if (!bad && (major != CAPABILITY / 10 || minor < CAPABILITY % 10))
    bad = fail("kernels for compute capability %d.%d, and device %d has %d.%d", CAPABILITY / 10, CAPABILITY % 10,
               device, major, minor);
  if (!bad && !(bad = failed(cuDevicePrimaryCtxRetain(&of->context, of->device), "cuDevicePrimaryCtxRetain")) &&
      !(bad = failed(cuCtxPushCurrent(of->context), "cuCtxPushCurrent"))) {
    bad = prepare(of, file);
    cuCtxPopCurrent(&popped);
  }
  fclose(file);
  if (bad) ridgeline_close(of);
  else *made = of;
  return bad;
}

/* Pinned memory that is read and written by a call, for who fills and reads it in place. */
void *ridgeline_input(struct ridgeline *of, size_t number) {
  return number < NUM_INPUTS ? of->pinned + inputs[number].host : NULL;
}
const void *ridgeline_output(struct ridgeline *of, size_t number) {
  return number < NUM_OUTPUTS ? of->pinned + outputs[number].host : NULL;
}

/* Starts a call over the pinned inputs; ridgeline_wait returns when the pinned outputs are there. */
int ridgeline_start(struct ridgeline *of) {
  void *popped;
  TRY(cuCtxPushCurrent(of->context), "cuCtxPushCurrent");
  int bad = failed(cuGraphLaunch(of->graph, of->stream), "cuGraphLaunch");
  cuCtxPopCurrent(&popped);
  return bad;
}
int ridgeline_wait(struct ridgeline *of) {
  void *popped;
  TRY(cuCtxPushCurrent(of->context), "cuCtxPushCurrent");
  int bad = failed(cuStreamSynchronize(of->stream), "a call");
  cuCtxPopCurrent(&popped);
  return bad;
}

/* A whole call from and to the caller's memory. */
int ridgeline_run(struct ridgeline *of, const void *const *in, void *const *out) {
  for (size_t i = 0; i < NUM_INPUTS; i++)
    if (inputs[i].bytes) memcpy(of->pinned + inputs[i].host, in[i], inputs[i].bytes);
  if (ridgeline_start(of) || ridgeline_wait(of)) return 1;
  for (size_t i = 0; i < NUM_OUTPUTS; i++)
    if (outputs[i].bytes) memcpy(out[i], of->pinned + outputs[i].host, outputs[i].bytes);
  return 0;
}

#ifdef RIDGELINE_MAIN
static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* engine [DATA [CALLS]]: inputs from stdin one after another, outputs to stdout; times of the calls to stderr. */
int main(int argc, char **argv) {
  struct ridgeline *of;
  double began = seconds();
  long calls = argc > 2 ? atol(argv[2]) : 1;
  if (ridgeline_open(argc > 1 ? argv[1] : "engine.bin", 0, &of)) {
    fprintf(stderr, "%s\n", ridgeline_error());
    return 1;
  }
  double opened = seconds();
  for (size_t i = 0; i < NUM_INPUTS; i++)
    if (inputs[i].bytes && fread(ridgeline_input(of, i), 1, inputs[i].bytes, stdin) != inputs[i].bytes) {
      fprintf(stderr, "input %zu has %zu bytes, and stdin ends before\n", i, (size_t)inputs[i].bytes);
      ridgeline_close(of);
      return 1;
    }
  double least = 1e30, least_start = 1e30;
  int bad = 0;
  for (long i = 0; i < calls && !bad; i++) {
    double start = seconds(), started;
    bad = ridgeline_start(of);
    started = seconds();
    bad = bad || ridgeline_wait(of);
    double took = seconds() - start;
    if (took < least) least = took;
    if (started - start < least_start) least_start = started - start;
  }
  if (bad) fprintf(stderr, "%s\n", ridgeline_error());
  else if (argc > 2)
    fprintf(stderr, "{\"open_s\": %.6f, \"call_s\": %.9f, \"start_s\": %.9f, \"calls\": %ld}\n", opened - began, least,
            least_start, calls);
  for (size_t i = 0; i < NUM_OUTPUTS && !bad; i++)
    bad = fwrite(ridgeline_output(of, i), 1, outputs[i].bytes, stdout) != outputs[i].bytes;
  ridgeline_close(of);
  return bad;
}
#endif
