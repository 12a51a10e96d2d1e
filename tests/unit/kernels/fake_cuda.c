/* Stands in for libcuda.so.1 where there is no GPU: accepts everything and remembers the last launch. */
#include <stdint.h>
#include <string.h>
static int context_a, context_b, pushed, function_a;
static void *current;
static unsigned last[7];
static uint64_t last_args[8];
static int num_args = 0;
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int *d, int o) { *d = o; return o > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = d ? (void *)&context_b : (void *)&context_a; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; pushed++; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = current; current = 0; pushed--; return 0; }
int cuModuleLoadData(void **m, const void *d) { *m = (void *)d; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = &function_a; return strcmp(n, "absent") ? 0 : 500; }
int cuFuncSetAttribute(void *f, int a, int v) { return v > 232448 ? 1 : 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a; return 0; }
int cuGetErrorString(int c, const char **t) { *t = "as the fake says"; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh,
                   void *stream, void **params, void **extra) {
  unsigned seen[7] = {gx, gy, gz, bx, sh, (unsigned)(uintptr_t)stream, (unsigned)pushed};
  memcpy(last, seen, sizeof(seen));
  for (int i = 0; i < num_args; i++) last_args[i] = *(uint64_t *)params[i];
  return gx == 999 ? 700 : 0;
}
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned sh, void *stream, void **params) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sh, stream, params, 0);
}
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  int *attributes;
  unsigned num;
} Config;
static int early;
int cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
  early = c->num == 1 && c->attributes[0] == 6 && c->attributes[2] == 1;
  return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                        c->stream, params, extra);
}
int fake_early(void) { return early; }
unsigned fake_last(int i) { return last[i]; }
uint64_t fake_arg(int i) { return last_args[i]; }
void fake_set_num_args(int n) { num_args = n; }
