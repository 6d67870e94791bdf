/* A libnvidia-ml.so.1 without a GPU, for tests of the NVIDIA device source: pynvml loads it like the real one.

   Grown from the project's design material (engines/nvml_stub.c). Values come from $NVML_STUB_FILE, read anew at
   every call, so a test changes them while the agent runs. One device a line, fields by blanks:
     uuid name total used reserved util tempC throttle ecc mig parent err v2err procs
   Sizes in MiB, "-" = nothing; a "_" in a name is a blank. err: an nvmlReturn_t that every call on the device gives
   (15 GPU_IS_LOST, 3 NOT_SUPPORTED, 4 NO_PERMISSION, 999 UNKNOWN); v2err: only for the version 2 memory query
   (1000 + N: for both memory queries).
   mig 1: the card is cut into slices, which are the lines whose parent is its uuid. procs: pid:MiB,pid:MiB; MiB -1
   is NVML's "not available". A first line "init N" makes nvmlInit and the device count fail with N.
   build: gcc -O2 -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml_stub.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
#define MIB 1048576ull
#define MOST 32

struct device {
  char uuid[96], name[96], parent[96], procs[256];
  u64 total, used, reserved, throttle, ecc;
  u32 util, temp, mig;
  int err, v2err;
};
static struct device devices[MOST];
static int count, init_error;

static int load(void) {
  const char *path = getenv("NVML_STUB_FILE");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[1024];
  count = init_error = 0;
  if (!file) return 9; /* DRIVER_NOT_LOADED */
  while (count < MOST && fgets(line, sizeof line, file)) {
    struct device *d = &devices[count];
    memset(d, 0, sizeof *d);
    if (sscanf(line, "init %d", &init_error) == 1) continue;
    if (sscanf(line, "%95s %95s %llu %llu %llu %u %u %llu %llu %u %95s %d %d %255s", d->uuid, d->name, &d->total, &d->used,
               &d->reserved, &d->util, &d->temp, &d->throttle, &d->ecc, &d->mig, d->parent, &d->err, &d->v2err,
               d->procs) == 14)
      count++;
  }
  fclose(file);
  return init_error;
}
static int card(const struct device *d) { return strcmp(d->parent, "-") == 0; }
/* The n-th card (parent NULL) or the n-th slice of a card. */
static struct device *nth(const char *parent, u32 n) {
  for (int i = 0; i < count; i++)
    if (parent ? !strcmp(devices[i].parent, parent) : card(&devices[i]))
      if (n-- == 0) return &devices[i];
  return NULL;
}
static void *handle_of(struct device *d) { return (void *)(size_t)(d - devices + 1); }
static int text(char *out, u32 length, const char *from) {
  if (strlen(from) >= length) return 7; /* INSUFFICIENT_SIZE */
  strcpy(out, from);
  return 0;
}
#define DEVICE(h)                                      \
  int failed = load();                                 \
  if (failed) return failed;                           \
  int at = (int)(size_t)(h)-1;                         \
  if (at < 0 || at >= count) return 2;                 \
  struct device *d = &devices[at];                     \
  if (d->err) return d->err

int nvmlInitWithFlags(u32 flags) { (void)flags; return load(); }
int nvmlInit_v2(void) { return load(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == 15 ? "GPU is lost" : e == 3 ? "Not Supported" : "stub error"; }
int nvmlDeviceGetCount_v2(u32 *n) {
  int failed = load();
  if (failed) return failed;
  for (*n = 0; nth(NULL, *n); ++*n) {}
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(u32 i, void **h) {
  int failed = load();
  if (failed) return failed;
  struct device *d = nth(NULL, i);
  if (!d) return 2;
  *h = handle_of(d);
  return d->err == 15 ? 15 : 0;
}
int nvmlDeviceGetUUID(void *h, char *out, u32 n) { DEVICE(h); return text(out, n, d->uuid); }
int nvmlDeviceGetName(void *h, char *out, u32 n) {
  DEVICE(h);
  int r = text(out, n, d->name);
  for (; !r && *out; out++) if (*out == '_') *out = ' ';
  return r;
}
struct memory_v1 { u64 total, free, used; };
struct memory_v2 { u32 version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(void *h, struct memory_v1 *m) { /* used includes what the driver reserves */
  DEVICE(h);
  if (d->v2err >= 1000) return d->v2err - 1000;
  m->total = d->total * MIB; m->used = (d->used + d->reserved) * MIB; m->free = m->total - m->used;
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, struct memory_v2 *m) {
  DEVICE(h);
  if (d->v2err) return d->v2err % 1000;
  if (m->version != 0x02000028) return 25;
  m->total = d->total * MIB; m->reserved = d->reserved * MIB; m->used = d->used * MIB;
  m->free = m->total - m->used - m->reserved;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *h, u32 *o) { DEVICE(h); if (d->mig) return 3; o[0] = d->util; o[1] = 0; return 0; }
int nvmlDeviceGetTemperature(void *h, u32 s, u32 *o) { (void)s; DEVICE(h); *o = d->temp; return 0; }
int nvmlDeviceGetClockInfo(void *h, u32 t, u32 *o) { (void)t; DEVICE(h); *o = 1755; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, u64 *o) { DEVICE(h); *o = d->throttle; return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, u32 t, u32 c, u64 *o) { (void)t; (void)c; DEVICE(h); *o = d->ecc; return 0; }
int nvmlDeviceGetMigMode(void *h, u32 *now, u32 *pending) { DEVICE(h); if (!card(d)) return 3; *now = *pending = d->mig; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, u32 *n) { DEVICE(h); *n = d->mig ? 7 : 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, u32 i, void **out) {
  DEVICE(h);
  struct device *slice = nth(d->uuid, i);
  if (!slice) return 6; /* NOT_FOUND */
  *out = handle_of(slice);
  return 0;
}
struct process { u32 pid; u64 used; u32 instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, u32 *n, struct process *out) {
  DEVICE(h);
  char list[256], *rest = NULL;
  u32 found = 0;
  strcpy(list, d->procs);
  for (char *entry = strtok_r(list, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
    u32 pid; long long mib;
    if (sscanf(entry, "%u:%lld", &pid, &mib) != 2) continue;
    if (out && found < *n) { out[found].pid = pid; out[found].used = mib < 0 ? ~0ull : (u64)mib * MIB; out[found].instance = out[found].compute = ~0u; }
    found++;
  }
  int short_of = found > *n;
  *n = found;
  return short_of ? 7 : 0;
}
