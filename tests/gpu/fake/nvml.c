/* NVML without a GPU behind it: as much of libnvidia-ml.so.1 as UCX's CUDA module calls.
 *
 * FAKE_NVLINKS in the environment is the number of NVLinks between the devices (18). Without any,
 * UCX emulates reads unless UCX_CUDA_IPC_ENABLE_GET_ZCOPY is set.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef void *Device;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DEVICES = 2, UNSIGNED_INT = 1, FIRST_BUS = 0x10 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pci_device_id;
    unsigned pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned field;
    unsigned scope;
    long long timestamp;
    long long latency;
    int value_type;
    Result result;
    union {
        double floating;
        unsigned number;
        unsigned long long large;
    } value;
} FieldValue;

static unsigned links(void)
{
    const char *text = getenv("FAKE_NVLINKS");
    return text != NULL ? (unsigned)atoi(text) : 18;
}

Result nvmlInit_v2(void)
{
    return SUCCESS;
}

Result nvmlShutdown(void)
{
    return SUCCESS;
}

Result nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = DEVICES;
    return SUCCESS;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    *device = (Device)(long)(index + 1); /* not NULL */
    return SUCCESS;
}

static void describe(unsigned bus, PciInfo *info)
{
    memset(info, 0, sizeof *info);
    info->bus = bus;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02x:00.0", bus);
}

Result nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info)
{
    describe(FIRST_BUS + (unsigned)(long)device - 1, info);
    return SUCCESS;
}

/* All links of one device lead to the other one. */
Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, PciInfo *info)
{
    if (link >= links()) {
        return NOT_SUPPORTED;
    }
    describe(FIRST_BUS + 2 - (unsigned)(long)device, info);
    return SUCCESS;
}

Result nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values)
{
    (void)device;
    for (int i = 0; i < count; i++) {
        values[i].result = SUCCESS;
        values[i].value_type = UNSIGNED_INT;
        values[i].value.number = links();
    }
    return SUCCESS;
}

Result nvmlDeviceGetGpuFabricInfoV(Device device, void *info)
{
    (void)device;
    (void)info;
    return NOT_SUPPORTED;
}

Result nvmlDeviceGetGpuFabricInfo(Device device, void *info)
{
    return nvmlDeviceGetGpuFabricInfoV(device, info);
}

const char *nvmlErrorString(Result result)
{
    return result == SUCCESS ? "success" : "not supported";
}
