/* Stands in for libcuda.so.1 where there is no GPU: accepts everything and remembers the last launch. */
#include <stdint.h>
#include <string.h>
static int context_a, context_b, pushed, function_a;
static void *current;
static unsigned last[7];
static uint64_t last_args[32];
static unsigned char last_map[128];
static int num_encoded, num_dependent, last_cluster, large_clusters;
static int num_args = 0;
static int num_launches = 0;
static uint64_t all_args[64][32];
static int captured;
int cuStreamGetId(void *stream, unsigned long long *id) { *id = 7 + (uintptr_t)stream; return 0; }
int cuStreamIsCapturing(void *stream, int *found) { *found = captured; return 0; }
void fake_capture(int whether) { captured = whether; }
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int o) { *d = o; return o > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = d ? (void *)&context_b : (void *)&context_a; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; pushed++; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = current; current = 0; pushed--; return 0; }
int cuModuleLoadData(void **m, const void *d) { *m = (void *)d; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = &function_a; return strcmp(n, "absent") ? 0 : 500; }
int cuFuncSetAttribute(void *f, int a, int v) { large_clusters += a == 14; return v > 232448 ? 1 : 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a; return 0; }
int cuGetErrorString(int c, const char **t) { *t = "as the fake says"; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh,
                   void *stream, void **params, void **extra) {
  unsigned seen[7] = {gx, gy, gz, bx, sh, (unsigned)(uintptr_t)stream, (unsigned)pushed};
  memcpy(last, seen, sizeof(seen));
  if (num_args) memcpy(last_map, params[0], num_args > 8 ? 128 : 8);
  for (int i = 0; i < num_args; i++) last_args[i] = *(uint64_t *)params[i];
  memcpy(all_args[num_launches++ % 64], last_args, sizeof(last_args));
  return gx == 999 ? 700 : 0;
}
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned sh, void *stream, void **params) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sh, stream, params, 0);
}
int cuLaunchKernelEx(const void *config, void *f, void **params, void **extra) {
  const unsigned *sizes = config; /* grid, block, shared, padding; then the stream and the attributes */
  struct { void *stream; int *attributes; unsigned num; } rest;
  memcpy(&rest, (const char *)config + 32, sizeof(rest));
  for (unsigned i = 0; i < rest.num; i++) { /* eighteen words each: the id, padding, the value */
    const int *one = rest.attributes + 18 * i;
    if (one[0] == 4) last_cluster = one[3] == 1 && one[4] == 1 ? one[2] : -1;
  }
  num_dependent += rest.num == 1 && rest.attributes[0] == 6 && rest.attributes[2] == 1;
  return cuLaunchKernel(f, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], rest.stream, params, extra);
}
int cuOccupancyMaxActiveClusters(int *num, void *f, const void *config) { /* as on a device of 132 multiprocessors */
  struct { unsigned sizes[8]; void *stream; const int *attributes; unsigned num; } seen;
  memcpy(&seen, config, sizeof(seen));
  *num = seen.attributes[0] == 4 ? 132 / seen.attributes[2] : -1;
  return seen.num == 1 ? 0 : 1;
}
int cuTensorMapEncodeTiled(void *map, unsigned type, unsigned rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned fill) {
  uint64_t seen[16] = {type, rank, (uint64_t)address, sizes[0], sizes[1], strides[0], box[0], box[1], swizzle, promotion};
  memcpy(map, seen, sizeof(seen));
  num_encoded++;
  return ((uint64_t)address & 15) ? 1 : 0;
}
uint64_t fake_map(int i) { uint64_t seen[16]; memcpy(seen, last_map, 128); return seen[i]; }
int fake_encoded(void) { return num_encoded; }
int fake_cluster(void) { return last_cluster; }
int fake_large_clusters(void) { return large_clusters; }
int fake_dependent(void) { return num_dependent; }
unsigned fake_last(int i) { return last[i]; }
uint64_t fake_arg(int i) { return last_args[i]; }
void fake_set_num_args(int n) { num_args = n; }
uint64_t fake_arg_of(int launch, int i) { return all_args[launch % 64][i]; }
int fake_num_launches(void) { return num_launches; }
