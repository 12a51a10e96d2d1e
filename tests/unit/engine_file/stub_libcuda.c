/* A libcuda that computes on the host and writes down what it is asked.

   Device memory is the host's, in allocations of its own, and every access is checked against them. Calls are lines in
   the file STUB_LOG names; STUB_FAIL, as "cuMemAlloc_v2:2:700", makes the second call of a function return an error.
   Work on a stream that is being captured becomes a node of its graph and is done when the graph is launched, with
   the kernel's arguments as they were. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;
#define MOST 64
struct allocation { unsigned char *at; size_t size; int pinned; };
struct node { int kind; Address to, from; size_t size; unsigned bits; void *function; uint64_t values[16]; unsigned grid[3]; };
struct graph { struct node nodes[MOST]; int num; };
static struct allocation held[MOST];
static struct graph *capturing;
static int counts[MOST];
static const char *names[MOST];

static int told(const char *name, const char *format, ...) {
  const char *path = getenv("STUB_LOG"), *failing = getenv("STUB_FAIL");
  int slot = 0;
  while (slot < MOST - 1 && names[slot] && strcmp(names[slot], name)) slot++;
  names[slot] = name;
  counts[slot]++;
  if (path) {
    FILE *file = fopen(path, "a");
    va_list given;
    fprintf(file, "%s ", name);
    va_start(given, format);
    vfprintf(file, format, given);
    va_end(given);
    fprintf(file, "%s\n", capturing ? " captured" : "");
    fclose(file);
  }
  size_t length = strlen(name);
  if (failing && !strncmp(failing, name, length) && failing[length] == ':') {
    int nth, code;
    if (sscanf(failing + length + 1, "%d:%d", &nth, &code) == 2 && nth == counts[slot]) return code;
  }
  return 0;
}
/* ANY_MEMORY: tensors of the host are handed over that the driver did not allocate. */
static void within(Address at, size_t size, int pinned, const char *what) {
#ifdef ANY_MEMORY
  return;
#endif
  for (int i = 0; i < MOST; i++)
    if (held[i].at && held[i].pinned == pinned && (unsigned char *)at >= held[i].at &&
        (unsigned char *)at + size <= held[i].at + held[i].size)
      return;
  fprintf(stderr, "stub: %s reaches outside of every allocation\n", what);
  abort();
}
static void *allocated(size_t size, int pinned) {
  for (int i = 0; i < MOST; i++)
    if (!held[i].at) {
      held[i] = (struct allocation){malloc(size), size, pinned};
      memset(held[i].at, 0xa5, size);
      return held[i].at;
    }
  abort();
}
static void freed(void *at, int pinned) {
  for (int i = 0; i < MOST; i++)
    if (held[i].at == at && held[i].pinned == pinned) {
      free(at);
      held[i].at = NULL;
      return;
    }
  fprintf(stderr, "stub: freed what was not allocated\n");
  abort();
}

/* The kernels that there are: floats in, floats out, each with its number of arguments. */
static void multiply(const uint64_t *v) { /* a, b, out, factor, num */
  const float *a = (float *)v[0], *b = (float *)v[1];
  float *out = (float *)v[2], factor;
  memcpy(&factor, &v[3], 4);
  int num = (int)v[4];
  within(v[0], 4 * (size_t)num, 0, "multiply a");
  within(v[1], 4 * (size_t)num, 0, "multiply b");
  within(v[2], 4 * (size_t)num, 0, "multiply out");
  for (int i = 0; i < num; i++) out[i] = a[i] * b[i] * factor;
}
static void shift(const uint64_t *v) { /* x, out, xnumel: out = x + 1 */
  int num = (int)v[2];
  within(v[0], 4 * (size_t)num, 0, "shift x");
  within(v[1], 4 * (size_t)num, 0, "shift out");
  for (int i = 0; i < num; i++) ((float *)v[1])[i] = ((float *)v[0])[i] + 1;
}
static struct kernel { const char *name; int num; void (*run)(const uint64_t *); } known[] = {
    {"multiply", 5, multiply}, {"shift", 3, shift}};

static Result did(struct node now) {
  if (capturing) {
    capturing->nodes[capturing->num++] = now;
    return 0;
  }
  if (now.kind == 'k') ((struct kernel *)now.function)->run(now.values);
  else if (now.kind == 'c') memcpy((void *)now.to, (void *)now.from, now.size);
  else for (size_t i = 0; i < now.size; i++) memcpy((char *)now.to + i * (now.kind - '0'), &now.bits, now.kind - '0');
  return 0;
}

#define TOLD(...) do { int code_ = told(__func__, __VA_ARGS__); if (code_) return code_; } while (0)
Result cuInit(unsigned flags) { TOLD("%u", flags); return 0; }
Result cuDeviceGet(int *device, int number) { TOLD("%d", number); *device = number; return number ? 101 : 0; }
Result cuDeviceGetAttribute(int *value, int which, int device) {
  const char *own = getenv("STUB_CAPABILITY");
  TOLD("%d %d", which, device);
  *value = which == 75 ? (own ? atoi(own) : 90) / 10 : (own ? atoi(own) : 90) % 10;
  return 0;
}
Result cuDevicePrimaryCtxRetain(void **made, int device) { TOLD("%d", device); *made = held; return 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) {
  TOLD("%d", device);
  for (int i = 0; i < MOST; i++)
    if (held[i].at) { fprintf(stderr, "stub: %zu bytes are still held\n", held[i].size); abort(); }
  return 0;
}
static int depth;
Result cuCtxPushCurrent_v2(void *context) { (void)context; TOLD("%d", ++depth); return 0; }
Result cuCtxPopCurrent_v2(void **context) { *context = held; TOLD("%d", depth--); return 0; }
Result cuMemAlloc_v2(Address *made, size_t size) { TOLD("%zu", size); *made = (Address)allocated(size, 0); return 0; }
Result cuMemFree_v2(Address at) { TOLD("."); freed((void *)at, 0); return 0; }
Result cuMemHostAlloc(void **made, size_t size, unsigned flags) { TOLD("%zu %u", size, flags); *made = allocated(size, 1); return 0; }
Result cuMemFreeHost(void *at) { TOLD("."); freed(at, 1); return 0; }
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) {
  (void)stream; TOLD("%zu", size); within(to, size, 0, "a copy in"); within((Address)from, size, 1, "its source");
  return did((struct node){.kind = 'c', .to = to, .from = (Address)from, .size = size});
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) {
  (void)stream; TOLD("%zu", size); within(from, size, 0, "a copy out"); within((Address)to, size, 1, "its target");
  return did((struct node){.kind = 'c', .to = (Address)to, .from = from, .size = size});
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, void *stream) {
  (void)stream; TOLD("%zu", size); within(from, size, 0, "a copy"); within(to, size, 0, "a copy");
  return did((struct node){.kind = 'c', .to = to, .from = from, .size = size});
}
static Result filled(Address to, unsigned bits, size_t count, int width) {
  within(to, count * (size_t)width, 0, "a fill");
  return did((struct node){.kind = '0' + width, .to = to, .size = count, .bits = bits});
}
Result cuMemsetD8Async(Address to, unsigned char bits, size_t count, void *stream) { (void)stream; TOLD("%u %zu", bits, count); return filled(to, bits, count, 1); }
Result cuMemsetD16Async(Address to, unsigned short bits, size_t count, void *stream) { (void)stream; TOLD("%u %zu", bits, count); return filled(to, bits, count, 2); }
Result cuMemsetD32Async(Address to, unsigned bits, size_t count, void *stream) { (void)stream; TOLD("%u %zu", bits, count); return filled(to, bits, count, 4); }
Result cuStreamCreate(void **made, unsigned flags) { TOLD("%u", flags); *made = malloc(1); return 0; }
Result cuStreamDestroy_v2(void *stream) { TOLD("."); free(stream); return 0; }
Result cuStreamSynchronize(void *stream) { (void)stream; TOLD("."); return 0; }
Result cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream; TOLD("%d", mode); capturing = calloc(1, sizeof *capturing); return 0; }
Result cuStreamEndCapture(void *stream, void **made) {
  (void)stream; TOLD("%d", capturing ? capturing->num : -1); *made = capturing; capturing = NULL; return 0;
}
Result cuEventCreate(void **made, unsigned flags) { TOLD("%u", flags); *made = malloc(1); return 0; }
Result cuEventRecord(void *event, void *stream) { (void)event; (void)stream; TOLD("."); return 0; }
Result cuEventSynchronize(void *event) { (void)event; TOLD("."); return 0; }
Result cuEventDestroy_v2(void *event) { TOLD("."); free(event); return 0; }
Result cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
  TOLD("%llu", flags); *made = malloc(sizeof(struct graph)); memcpy(*made, graph, sizeof(struct graph)); return 0;
}
Result cuGraphLaunch(void *graph, void *stream) {
  struct graph *all = graph;
  (void)stream; TOLD("%d", all->num);
  for (int i = 0; i < all->num; i++) did(all->nodes[i]);
  return 0;
}
Result cuGraphDestroy(void *graph) { TOLD("."); free(graph); return 0; }
Result cuGraphExecDestroy(void *graph) { TOLD("."); free(graph); return 0; }
Result cuModuleLoadData(void **made, const void *code) {
  TOLD("%.4s", memcmp(code, "\177ELF", 4) ? (const char *)code : "ELF"); *made = malloc(1); return 0;
}
Result cuModuleUnload(void *module) { TOLD("."); free(module); return 0; }
Result cuModuleGetFunction(void **made, void *module, const char *name) {
  (void)module; TOLD("%s", name);
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(known[i].name, name)) { *made = &known[i]; return 0; }
  return 500;
}
Result cuFuncSetAttribute(void *function, int which, int value) { (void)function; TOLD("%d %d", which, value); return 0; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **params, void **extra) {
  struct kernel *what = function;
  struct node now = {.kind = 'k', .function = function, .grid = {x, y, z}};
  (void)stream; (void)extra;
  for (int i = 0; i < what->num; i++) memcpy(&now.values[i], params[i], 8);
  TOLD("%s %u,%u,%u %u,%u,%u %u", what->name, x, y, z, bx, by, bz, shared);
  return did(now);
}
Result cuGetErrorString(int code, const char **text) { *text = code == 700 ? "an illegal address" : "an error"; return 0; }
