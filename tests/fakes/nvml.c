/*
 * A driver library that answers as a script says: libnvidia-ml.so.1 for machines without a GPU.
 *
 * The environment variable FAKE_NVML names the script; it is read again whenever it changed, so a test can
 * break a GPU while somebody is looking. One statement a line, GPU -1 meaning every GPU:
 *
 *   gpus N               how many there are              count N          what nvmlDeviceGetCount says instead
 *   name WORDS           the model                       memory BYTES     of each GPU
 *   garbage GPU          its name is not UTF-8           unified          memory cannot be asked for
 *   domain HEX           PCI domain of every GPU         driver WORDS     the driver's version
 *   fail CALL GPU CODE   the call returns that code      hang CALL GPU    it never returns
 *   crash CALL GPU       it ends the process             mig GPU N        MIG is on, with N devices
 *   fabric STATE STATUS CLIQUE UUIDHEX MASK              fabric3 0        the library knows only version 2 of it
 *   process GPU PID BYTES (1000 x N + GPU: its Nth MIG device)
 *                                                        xid GPU CODE     raised once
 *   links N              NVLinks of each GPU             linkdown GPU N   that many of them are down
 *   field ID GPU VALUE   a field value                   remap GPU CORRECTABLE UNCORRECTABLE PENDING FAILED
 *   ecc GPU TYPE COUNTER VALUE                           sram GPU TYPE COUNTER VALUE
 *   throttle GPU BITS    temperature GPU DEGREES         pcie GPU GEN WIDTH
 *   p2p GPU STATUS       towards every other GPU
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, VERSION = 25 };
enum { MOST = 512, MOST_GPUS = 64, MIG_BASE = 1000 };

static char lines[MOST][160];
static int count_lines;
static struct timespec read_at;
static long delivered; /* xids given so far */

static void script(void) {
    const char *path = getenv("FAKE_NVML");
    struct stat now;
    if (!path || stat(path, &now) || !memcmp(&now.st_mtim, &read_at, sizeof read_at)) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    read_at = now.st_mtim;
    for (count_lines = 0; count_lines < MOST && fgets(lines[count_lines], sizeof lines[0], file);) {
        lines[count_lines][strcspn(lines[count_lines], "\n")] = 0;
        count_lines++;
    }
    fclose(file);
}

/* The rest of the last line that begins with `key`, or NULL. */
static const char *say(const char *key) {
    size_t length = strlen(key);
    const char *found = NULL;
    for (int i = 0; i < count_lines; i++)
        if (!strncmp(lines[i], key, length) && (lines[i][length] == ' ' || !lines[i][length]))
            found = lines[i] + length + (lines[i][length] == ' ');
    return found;
}

static long number(const char *key, long otherwise) {
    const char *words = say(key);
    return words ? strtol(words, NULL, 0) : otherwise;
}

/* The rest of the last line `key GPU ...` for this GPU or for every GPU. */
static const char *of(const char *key, long gpu) {
    size_t length = strlen(key);
    const char *found = NULL;
    for (int i = 0; i < count_lines; i++) {
        if (strncmp(lines[i], key, length) || lines[i][length] != ' ') continue;
        char *rest;
        long which = strtol(lines[i] + length, &rest, 0);
        if (which == gpu || which == -1) found = *rest == ' ' ? rest + 1 : rest;
    }
    return found;
}

static long about(const char *key, long gpu, long otherwise) {
    const char *words = of(key, gpu);
    return words ? strtol(words, NULL, 0) : otherwise;
}

static int behave(const char *call, long gpu) {
    char key[120];
    const char *words;
    script();
    snprintf(key, sizeof key, "hang %s", call);
    if (of(key, gpu)) for (;;) pause();
    snprintf(key, sizeof key, "crash %s", call);
    if (of(key, gpu)) raise(SIGSEGV);
    snprintf(key, sizeof key, "fail %s", call);
    words = of(key, gpu);
    return words ? (int)strtol(words, NULL, 0) : OK;
}

/* A handle is the address of its index's slot; MIG devices follow their GPU's at MIG_BASE. */
static char slots[MOST_GPUS * MIG_BASE];
typedef char *Handle;
static long index_of(Handle handle) { return handle - slots; }
static long gpu_of(Handle handle) { return index_of(handle) % MIG_BASE; }
static int is_mig(Handle handle) { return index_of(handle) >= MIG_BASE; }

#define BEHAVE(gpu) do { int code_ = behave(__func__, gpu); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; BEHAVE(-1); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { static char words[32]; snprintf(words, sizeof words, "code %d", code); return words; }

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    BEHAVE(-1);
    const char *words = say("driver");
    snprintf(out, length, "%s", words ? words : "570.172.08");
    return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { BEHAVE(-1); *out = 12080; return OK; }

int nvmlDeviceGetCount_v2(unsigned *out) { BEHAVE(-1); *out = number("count", number("gpus", 8)); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out) {
    BEHAVE(index);
    if (index >= (unsigned)number("count", number("gpus", 8))) return INVALID;
    *out = slots + index;
    return OK;
}
int nvmlDeviceGetUUID(Handle handle, char *out, unsigned length) {
    BEHAVE(gpu_of(handle));
    if (is_mig(handle)) snprintf(out, length, "MIG-%08lx-0000-0000-0000-000000000%03ld", index_of(handle), gpu_of(handle));
    else snprintf(out, length, "GPU-%08lx-0000-0000-0000-000000000000", gpu_of(handle));
    return OK;
}
int nvmlDeviceGetName(Handle handle, char *out, unsigned length) {
    BEHAVE(gpu_of(handle));
    const char *words = say("name");
    if (of("garbage", gpu_of(handle))) words = "NVIDIA \xff\xfe H100";
    snprintf(out, length, "%s%s", words ? words : "NVIDIA H100 80GB HBM3", is_mig(handle) ? " MIG 1g.10gb" : "");
    return OK;
}
int nvmlDeviceGetSerial(Handle handle, char *out, unsigned length) {
    BEHAVE(gpu_of(handle));
    snprintf(out, length, "16509230%05ld", gpu_of(handle));
    return OK;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Handle handle, Pci *out) {
    BEHAVE(gpu_of(handle));
    const char *words = say("domain");
    memset(out, 0, sizeof *out);
    out->domain = words ? strtol(words, NULL, 16) : 0;
    out->bus = 0x1b + gpu_of(handle);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:00.0", out->domain, out->bus);
    return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
static unsigned long long total_of(Handle handle) {
    const char *words = say("memory");
    return (words ? strtoull(words, NULL, 0) : 85520809984ULL) / (is_mig(handle) ? 8 : 1);
}
int nvmlDeviceGetMemoryInfo(Handle handle, Memory *out) {
    BEHAVE(is_mig(handle) ? -2 : gpu_of(handle));
    if (say("unified")) return NOT_SUPPORTED;
    out->total = total_of(handle); out->used = 1ULL << 30; out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2 *out) {
    BEHAVE(is_mig(handle) ? -2 : gpu_of(handle));
    if (out->version != 0x02000028) return VERSION;
    if (say("unified")) return NOT_SUPPORTED;
    out->total = total_of(handle); out->used = 1ULL << 30; out->reserved = 500 << 20;
    out->free = out->total - out->used - out->reserved;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) { BEHAVE(gpu_of(handle)); *major = 9; *minor = 0; return OK; }
int nvmlDeviceGetMigMode(Handle handle, unsigned *now, unsigned *pending) {
    BEHAVE(gpu_of(handle));
    *now = *pending = of("mig", gpu_of(handle)) != NULL;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *out) {
    BEHAVE(gpu_of(handle));
    if (index >= about("mig", gpu_of(handle), 0)) return NOT_FOUND;
    *out = slots + gpu_of(handle) + MIG_BASE * (index + 1);
    return OK;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, Process *out) {
    BEHAVE(gpu_of(handle));
    unsigned found = 0, room = out ? *count : 0;
    for (int i = 0; i < count_lines; i++) {
        long gpu; unsigned pid; unsigned long long bytes;
        if (sscanf(lines[i], "process %ld %u %llu", &gpu, &pid, &bytes) != 3 || gpu != index_of(handle)) continue;
        if (found < room) out[found] = (Process){pid, bytes ? bytes : ~0ULL, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *count, Process *out) {
    (void)out; BEHAVE(gpu_of(handle)); *count = 0; return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Handle handle, Utilization *out) { BEHAVE(gpu_of(handle)); out->gpu = 37; out->memory = 12; return OK; }

static int triple(const char *key, Handle handle, int type, int counter, unsigned long long *out) {
    char name[40];
    snprintf(name, sizeof name, "%s %ld", key, gpu_of(handle));
    *out = 0;
    for (int i = 0; i < count_lines; i++) {
        int t, c; unsigned long long value;
        size_t length = strlen(name);
        if (strncmp(lines[i], name, length) || lines[i][length] != ' ') continue;
        if (sscanf(lines[i] + length, "%d %d %llu", &t, &c, &value) == 3 && t == type && c == counter) *out = value;
    }
    return OK;
}
int nvmlDeviceGetTotalEccErrors(Handle handle, int type, int counter, unsigned long long *out) { BEHAVE(gpu_of(handle)); return triple("ecc", handle, type, counter, out); }
int nvmlDeviceGetMemoryErrorCounter(Handle handle, int type, int counter, int where, unsigned long long *out) {
    BEHAVE(gpu_of(handle));
    return where == 7 ? triple("sram", handle, type, counter, out) : NOT_SUPPORTED;
}
int nvmlDeviceGetRemappedRows(Handle handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    BEHAVE(gpu_of(handle));
    *correctable = *uncorrectable = *pending = *failed = 0;
    const char *words = of("remap", gpu_of(handle));
    if (words) sscanf(words, "%u %u %u %u", correctable, uncorrectable, pending, failed);
    return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); (void)out; return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksEventReasons(Handle handle, unsigned long long *out) { BEHAVE(gpu_of(handle)); *out = about("throttle", gpu_of(handle), 1); return OK; }

typedef struct { unsigned version; int sensor, temperature; } Temperature;
int nvmlDeviceGetTemperatureV(Handle handle, Temperature *out) { BEHAVE(gpu_of(handle)); out->temperature = about("temperature", gpu_of(handle), 41); return OK; }
int nvmlDeviceGetPowerUsage(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = 112345; return OK; }

static unsigned pcie(Handle handle, int part, unsigned otherwise) {
    unsigned values[2];
    const char *words = of("pcie", gpu_of(handle));
    return words && sscanf(words, "%u %u", values, values + 1) == 2 ? values[part] : otherwise;
}
int nvmlDeviceGetCurrPcieLinkGeneration(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = pcie(handle, 0, 5); return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = pcie(handle, 1, 16); return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = 5; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(Handle handle, unsigned *out) { BEHAVE(gpu_of(handle)); *out = 16; return OK; }

int nvmlDeviceGetNvLinkState(Handle handle, unsigned link, unsigned *out) {
    BEHAVE(gpu_of(handle));
    if (link >= (unsigned)number("links", 18)) return INVALID;
    *out = link >= (unsigned)about("linkdown", gpu_of(handle), 0);
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Handle handle, unsigned link, int *out) {
    BEHAVE(gpu_of(handle));
    if (link >= (unsigned)number("links", 18)) return INVALID;
    *out = 2;
    return OK;
}

typedef struct { unsigned field, scope; int64_t at, latency; int type, code; union { double d; unsigned u; unsigned long long ull; } value; } Field;
int nvmlDeviceGetFieldValues(Handle handle, int count, Field *out) {
    BEHAVE(gpu_of(handle));
    for (int i = 0; i < count; i++) {
        char key[40];
        snprintf(key, sizeof key, "field %u", out[i].field);
        const char *words = of(key, gpu_of(handle));
        out[i].type = 3;
        out[i].code = OK;
        out[i].value.ull = words ? strtoull(words, NULL, 0) : 0;
        if (out[i].field == 230) { out[i].type = 1; out[i].value.u = words ? strtoul(words, NULL, 0) : 0; }
    }
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(Handle a, Handle b, int *out) { BEHAVE(gpu_of(a)); BEHAVE(gpu_of(b)); *out = gpu_of(a) / 4 == gpu_of(b) / 4 ? 40 : 50; return OK; }
int nvmlDeviceGetP2PStatus(Handle a, Handle b, int which, int *out) { BEHAVE(gpu_of(a)); BEHAVE(gpu_of(b)); (void)which; *out = about("p2p", gpu_of(a), 0); return OK; }

typedef struct { unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state; unsigned mask; unsigned char summary; } Fabric;
int nvmlDeviceGetGpuFabricInfoV(Handle handle, Fabric *out) {
    BEHAVE(gpu_of(handle));
    int newest = number("fabric3", 1);
    if (out->version != 0x02000024 && !(newest && out->version == 0x03000028)) return VERSION;
    unsigned version = out->version, state = 0, mask = 0;
    char hex[40] = "";
    const char *words = say("fabric");
    memset(out->uuid, 0, sizeof out->uuid);
    out->status = OK; out->clique = 0;
    if (words) sscanf(words, "%u %d %u %32s %i", &state, &out->status, &out->clique, hex, (int *)&mask);
    for (int i = 0; i < 16 && strlen(hex) == 32; i++) { unsigned byte; sscanf(hex + 2 * i, "%2x", &byte); out->uuid[i] = byte; }
    out->state = state; out->mask = mask;
    if (version == 0x03000028) out->summary = 0;
    return OK;
}

int nvmlEventSetCreate(char **out) { BEHAVE(-1); *out = slots; return OK; }
int nvmlDeviceRegisterEvents(Handle handle, unsigned long long kinds, char *set) { (void)kinds; (void)set; BEHAVE(gpu_of(handle)); return OK; }
int nvmlEventSetFree(char *set) { (void)set; return OK; }

typedef struct { Handle device; unsigned long long type, data; unsigned instance, compute; } Event;
int nvmlEventSetWait_v2(char *set, Event *out, unsigned milliseconds) {
    (void)set; (void)milliseconds;
    BEHAVE(-1);
    long seen = 0;
    for (int i = 0; i < count_lines; i++) {
        long gpu, code;
        if (sscanf(lines[i], "xid %ld %ld", &gpu, &code) != 2 || seen++ < delivered) continue;
        delivered++;
        *out = (Event){slots + gpu, 8, code, ~0u, ~0u};
        return OK;
    }
    return TIMEOUT;
}
