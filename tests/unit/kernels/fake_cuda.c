/* Stands in for libcuda.so.1 where there is no GPU: accepts everything and remembers the last launch. */
#include <stdint.h>
#include <string.h>
static int context_a, context_b, pushed, function_a;
static void *current;
static unsigned last[7];
static uint64_t last_args[8];
static int num_args = 0, num_launches = 0;
static uint64_t all_args[64][8];
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
  memcpy(all_args[num_launches++ % 64], last_args, sizeof(last_args));
  return gx == 999 ? 700 : 0;
}
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned sh, void *stream, void **params) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sh, stream, params, 0);
}
unsigned fake_last(int i) { return last[i]; }
uint64_t fake_arg(int i) { return last_args[i]; }
void fake_set_num_args(int n) { num_args = n; }
uint64_t fake_arg_of(int launch, int i) { return all_args[launch % 64][i]; }
int fake_num_launches(void) { return num_launches; }
