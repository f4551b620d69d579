/* A libnvidia-ml.so.1 for machines without one: answers from the file that FAKE_NVML names, read
 * anew at each question, so that a test can change what is true while a program runs.
 *
 *   gpu UUID NAME USED_MIB MIG ECC RECOVERY STATE    STATE: ok, lost, broken (every question fails),
 *                                                    denied (it is counted, and not to be had)
 *   mig GPU UUID USED_MIB                            GPU: its number
 *   proc GPU PID MIB                                 MIB below 0: not available
 *   xid GPU NUMBER                                   told once to each set of events
 *   hang SECONDS                                     every question takes that long
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;

enum { OK = 0, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7,
       TIMEOUT = 10, LOST = 15, UNKNOWN = 999 };
enum { MOST = 16, FIRST_MIG = 100 };

typedef struct { char uuid[64], name[64], state[16]; u64 used; int mig, ecc, recovery; } Gpu;
typedef struct { int gpu; char uuid[64]; u64 used; } Mig;
typedef struct { int gpu; u32 pid; long long used; } Proc;
typedef struct { int gpu; u64 number; } Xid;
typedef struct { u32 pid; u64 used; u32 instance, compute; } ProcInfo;
typedef struct { u32 field, scope; long long at, latency; u32 type, result; u64 value; } Field;
typedef struct { void *device; u64 type, data; u32 instance, compute; } Event;
typedef struct { int told, listening; } EventSet;

static Gpu gpus[MOST];
static Mig migs[MOST];
static Proc procs[MOST];
static Xid xids[MOST];
static int n_gpus, n_migs, n_procs, n_xids;

static void look(void) {
    char line[256];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    n_gpus = n_migs = n_procs = n_xids = 0;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        Gpu g = {0};
        Mig m = {0};
        Proc p = {0};
        Xid x = {0};
        u32 seconds;
        if (sscanf(line, "gpu %63s %63s %llu %d %d %d %15s", g.uuid, g.name, &g.used, &g.mig,
                   &g.ecc, &g.recovery, g.state) == 7)
            gpus[n_gpus++] = g;
        else if (sscanf(line, "mig %d %63s %llu", &m.gpu, m.uuid, &m.used) == 3)
            migs[n_migs++] = m;
        else if (sscanf(line, "proc %d %u %lld", &p.gpu, &p.pid, &p.used) == 3)
            procs[n_procs++] = p;
        else if (sscanf(line, "xid %d %llu", &x.gpu, &x.number) == 2)
            xids[n_xids++] = x;
        else if (sscanf(line, "hang %u", &seconds) == 1)
            sleep(seconds);
    }
    fclose(file);
}

static int mig_of(void *device) { return (int)(long)device - FIRST_MIG; }
static int gpu_of(void *device) {
    int mig = mig_of(device);
    return mig >= 0 ? migs[mig].gpu : (int)(long)device - 1;
}
static int how_is(void *device) {
    look();
    int gpu = gpu_of(device);
    if (gpu < 0 || gpu >= n_gpus) return BAD_ARGUMENT;
    if (!strcmp(gpus[gpu].state, "lost")) return LOST;
    return strcmp(gpus[gpu].state, "ok") ? UNKNOWN : OK;
}

int nvmlInitWithFlags(u32 flags) { (void)flags; return getenv("FAKE_NVML") ? OK : 9; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { look(); *count = n_gpus; return OK; }

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    look();
    if (index >= (u32)n_gpus) return BAD_ARGUMENT;
    if (!strcmp(gpus[index].state, "denied")) return NO_PERMISSION;
    *device = (void *)(long)(index + 1);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    look();
    for (int i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            *device = (void *)(long)(i + 1);
            return how_is(*device);
        }
    for (int i = 0; i < n_migs; i++)
        if (!strcmp(migs[i].uuid, uuid)) {
            *device = (void *)(long)(i + FIRST_MIG);
            return how_is(*device);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, u32 length) {
    look();
    int mig = mig_of(device);
    snprintf(uuid, length, "%s", mig >= 0 ? migs[mig].uuid : gpus[gpu_of(device)].uuid);
    return OK;
}

int nvmlDeviceGetName(void *device, char *name, u32 length) {
    look();
    snprintf(name, length, "%s", gpus[gpu_of(device)].name);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, u64 *memory) {
    int result = how_is(device), mig = mig_of(device);
    u64 used = mig >= 0 ? migs[mig].used : gpus[gpu_of(device)].used;
    memory[0] = 80ULL << 30;
    memory[2] = used << 20;
    memory[1] = memory[0] - memory[2];
    return result;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, ProcInfo *infos) {
    int result = how_is(device), gpu = gpu_of(device);
    u32 found = 0, room = *count;
    if (result) return result;
    for (int i = 0; i < n_procs; i++) {
        if (procs[i].gpu != gpu) continue;
        if (infos && found < room) {
            memset(&infos[found], 0, sizeof *infos);
            infos[found].pid = procs[i].pid;
            infos[found].used = procs[i].used < 0 ? ~0ULL : (u64)procs[i].used << 20;
        }
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending) {
    int result = how_is(device);
    *current = *pending = gpus[gpu_of(device)].mig;
    return result;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) { *count = 7; return how_is(device); }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **instance) {
    int result = how_is(device), gpu = gpu_of(device);
    if (result) return result;
    for (int i = 0; i < n_migs; i++)
        if (migs[i].gpu == gpu && !index--) {
            *instance = (void *)(long)(i + FIRST_MIG);
            return OK;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, u64 *count) {
    int result = how_is(device), ecc = gpus[gpu_of(device)].ecc;
    if (result) return result;
    if (ecc < 0) return NOT_SUPPORTED;
    *count = type == 1 && counter == 0 ? (u64)ecc : 0;
    return OK;
}

int nvmlDeviceGetRemappedRows(void *device, u32 *mended, u32 *lost, u32 *pending, u32 *failed) {
    *mended = *lost = *pending = *failed = 0;
    return how_is(device);
}

int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
    int result = how_is(device);
    for (int i = 0; i < count; i++) {
        int action = gpus[gpu_of(device)].recovery;
        fields[i].result = fields[i].field == 230 && action >= 0 ? OK : NOT_SUPPORTED;
        fields[i].type = 1;
        fields[i].value = action > 0 ? (u64)action : 0;
    }
    return result;
}

int nvmlEventSetCreate(void **set) {
    look();
    EventSet *made = calloc(1, sizeof *made);
    made->told = n_xids;
    *set = made;
    return OK;
}

int nvmlDeviceRegisterEvents(void *device, u64 types, void *set) {
    (void)types;
    if (mig_of(device) >= 0) return NOT_SUPPORTED;
    ((EventSet *)set)->listening |= 1 << gpu_of(device);
    return OK;
}

int nvmlEventSetWait_v2(void *set, Event *event, u32 timeout) {
    EventSet *mine = set;
    (void)timeout;
    look();
    while (mine->told < n_xids) {
        Xid xid = xids[mine->told++];
        if (!(mine->listening & 1 << xid.gpu)) continue;
        memset(event, 0, sizeof *event);
        event->device = (void *)(long)(xid.gpu + 1);
        event->type = 8;
        event->data = xid.number;
        return OK;
    }
    return TIMEOUT;
}

int nvmlEventSetFree(void *set) { free(set); return OK; }
