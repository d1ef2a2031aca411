/* A CUDA driver without a GPU behind it: as much of libcuda.so.1 as UCX's CUDA modules call.
 *
 * Device memory is host memory that other processes can map. A stream is a queue of operations.
 * One thread takes them from the streams in random order, as far as events allow, and waits a
 * random time before each. So a copy that was posted has usually not run yet.
 *
 * Like the real driver, and unlike a convenient one:
 *   - most calls fail in a thread without a current context;
 *   - destroying a stream, or closing a handle of another process, waits for no copy;
 *   - memory of a process that has ended cannot be opened any more.
 *
 * Environment, read once:
 *   FAKE_CUDA_DELAY_US    longest delay before a copy (0)
 *   FAKE_CUDA_SEED        of the random order (the process id)
 *   FAKE_CUDA_MEMORY      bytes of device memory in this process (8 GiB)
 *   FAKE_CUDA_NO_IPC      set: no memory can be shared with other processes, as with MIG
 *   FAKE_CUDA_FIRST_VMM   set: nor can the first allocation, as memory of cuMemCreate
 *   CUDA_VISIBLE_DEVICES  numbers of the devices that this process sees, in its own order
 *
 * fake_cuda_count() returns the totals that tests look at; fake_cuda_delay() sets the delay.
 * fake_cuda_hold_opens(1) has each opening of another process's memory wait until it is called
 * with 0. The real driver has taken seconds for 64 GB.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Result;
typedef void *Context;
typedef uint64_t Address;

/* Values of cuda.h. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};
enum {
    DEVICE_PCI_BUS_ID = 33,
    DEVICE_UNIFIED_ADDRESSING = 41,
    DEVICE_COMPUTE_CAPABILITY_MAJOR = 75,
};
enum {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_IS_LEGACY_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MAPPED = 13,
    POINTER_ALLOWED_HANDLE_TYPES = 14,
    POINTER_MEMPOOL_HANDLE = 17,
};
enum { MEMORY_TYPE_DEVICE = 2, NO_DEVICE = -2 };

enum {
    DEVICES = 2,
    MAX_ALLOCATIONS = 4096,
    MAX_STREAMS = 1024,
    MAX_CONTEXT_DEPTH = 32,
    HANDLE_BYTES = 64,
    ALIGNMENT = 2 << 20, /* of an allocation, as cuMemAlloc gives out large ones */
};

/* Totals for tests -------------------------------------------------------------------------- */

static long contexts_made[DEVICES];
static long handles_made;   /* cuIpcGetMemHandle: one for each registration that is shared */
static long handles_opened; /* cuIpcOpenMemHandle */
static long handles_awaited; /* calls of it that were held */
static volatile int are_opens_held;
static long copies_posted;
static long copies_ended;

long fake_cuda_count(const char *what, int device)
{
    if (!strcmp(what, "contexts") && device >= 0 && device < DEVICES) {
        return contexts_made[device];
    }
    if (!strcmp(what, "handles made")) {
        return handles_made;
    }
    if (!strcmp(what, "handles opened")) {
        return handles_opened;
    }
    if (!strcmp(what, "handles awaited")) {
        return handles_awaited;
    }
    if (!strcmp(what, "copies posted")) {
        return copies_posted;
    }
    if (!strcmp(what, "copies ended")) {
        return copies_ended;
    }
    return -1;
}

void fake_cuda_hold_opens(int hold)
{
    are_opens_held = hold;
}

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? atol(text) : otherwise;
}

/* Which device of the machine has a number in this process ------------------------------------ */

static int machine_numbers[DEVICES];
static int visible_count;
static pthread_once_t visible_once = PTHREAD_ONCE_INIT;

static void read_visible(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (text == NULL) {
        text = "0,1";
    }
    while (*text != '\0' && visible_count < DEVICES) {
        machine_numbers[visible_count++] = *text - '0';
        text += text[1] == ',' ? 2 : 1;
    }
}

static int is_visible(int device)
{
    pthread_once(&visible_once, read_visible);
    return device >= 0 && device < visible_count;
}

static int machine_number(int device)
{
    return is_visible(device) ? machine_numbers[device] : device;
}

/* Contexts ---------------------------------------------------------------------------------- */

static char contexts[DEVICES]; /* a context is the address of its element */
static int retained[DEVICES];
static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread Context context_stack[MAX_CONTEXT_DEPTH];
static __thread int context_depth;

static Context current(void)
{
    return context_depth > 0 ? context_stack[context_depth - 1] : NULL;
}

static int device_of(Context context)
{
    for (int device = 0; device < DEVICES; device++) {
        if (context == &contexts[device]) {
            return device;
        }
    }
    return NO_DEVICE;
}

Result cuDevicePrimaryCtxRetain(Context *context, int device)
{
    if (!is_visible(device)) {
        return INVALID_DEVICE;
    }
    pthread_mutex_lock(&context_lock);
    if (retained[device]++ == 0) {
        contexts_made[device]++;
    }
    pthread_mutex_unlock(&context_lock);
    *context = &contexts[device];
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(int device)
{
    pthread_mutex_lock(&context_lock);
    Result result = retained[device] > 0 ? SUCCESS : INVALID_CONTEXT;
    if (result == SUCCESS) {
        retained[device]--;
    }
    pthread_mutex_unlock(&context_lock);
    return result;
}

Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active)
{
    *flags = 0;
    *is_active = retained[device] > 0;
    return SUCCESS;
}

Result cuCtxGetCurrent(Context *context)
{
    *context = current();
    return SUCCESS;
}

Result cuCtxSetCurrent(Context context)
{
    if (context == NULL) {
        context_depth -= context_depth > 0;
        return SUCCESS;
    }
    if (context_depth == 0) {
        context_depth = 1;
    }
    context_stack[context_depth - 1] = context;
    return SUCCESS;
}

Result cuCtxPushCurrent_v2(Context context)
{
    if (context == NULL || context_depth == MAX_CONTEXT_DEPTH) {
        return INVALID_CONTEXT;
    }
    context_stack[context_depth++] = context;
    return SUCCESS;
}

Result cuCtxPopCurrent_v2(Context *context)
{
    if (context_depth == 0) {
        return INVALID_CONTEXT;
    }
    context_depth--;
    if (context != NULL) {
        *context = context_stack[context_depth];
    }
    return SUCCESS;
}

Result cuCtxGetDevice(int *device)
{
    *device = device_of(current());
    return current() != NULL ? SUCCESS : INVALID_CONTEXT;
}

Result cuCtxGetFlags(unsigned *flags)
{
    *flags = 0;
    return current() != NULL ? SUCCESS : INVALID_CONTEXT;
}

Result cuCtxGetId(Context context, unsigned long long *id)
{
    Context asked = context != NULL ? context : current();
    if (asked == NULL) {
        return INVALID_CONTEXT;
    }
    *id = 100 + device_of(asked);
    return SUCCESS;
}

/* Devices ----------------------------------------------------------------------------------- */

Result cuInit(unsigned flags)
{
    (void)flags;
    return SUCCESS;
}

Result cuDriverGetVersion(int *version)
{
    *version = 12080;
    return SUCCESS;
}

Result cuDeviceGetCount(int *count)
{
    pthread_once(&visible_once, read_visible);
    *count = visible_count;
    return SUCCESS;
}

Result cuDeviceGet(int *device, int ordinal)
{
    if (!is_visible(ordinal)) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}

Result cuDeviceGetName(char *name, int size, int device)
{
    snprintf(name, size, "Fake GPU %d", machine_number(device));
    return SUCCESS;
}

Result cuDeviceGetUuid(void *uuid, int device)
{
    memset(uuid, 0, 16);
    memcpy(uuid, "fake", 4);
    ((char *)uuid)[15] = (char)machine_number(device);
    return SUCCESS;
}

Result cuDeviceGetUuid_v2(void *uuid, int device)
{
    return cuDeviceGetUuid(uuid, device);
}

Result cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = setting("FAKE_CUDA_MEMORY", 8L << 30);
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case DEVICE_PCI_BUS_ID:
        *value = 0x10 + machine_number(device); /* as nvml.c has it */
        break;
    case DEVICE_UNIFIED_ADDRESSING:
        *value = 1;
        break;
    case DEVICE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    default:
        *value = 0;
    }
    return SUCCESS;
}

/* Memory ------------------------------------------------------------------------------------ */

typedef struct {
    uintptr_t address;
    size_t size; /* 0: freed */
    int device;
    int descriptor; /* by which other processes map it; -1 of their memory */
    int is_vmm;
    uint64_t id;
} Allocation;

typedef struct {
    pid_t process;
    int descriptor;
    int device;
    size_t size;
    uint64_t id;
} SharedMemory; /* the contents of an IPC handle */

typedef struct {
    char bytes[HANDLE_BYTES];
} Handle;

static Allocation allocations[MAX_ALLOCATIONS];
static int allocation_count;
static uint64_t last_id;
static size_t bytes_in_use;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

/* With `memory_lock` held. */
static Allocation *find(uintptr_t address)
{
    for (int i = 0; i < allocation_count; i++) {
        Allocation *one = &allocations[i];
        if (address >= one->address && address < one->address + one->size) {
            return one;
        }
    }
    return NULL;
}

static int is_known(uintptr_t address, Allocation *copy)
{
    pthread_mutex_lock(&memory_lock);
    Allocation *found = find(address);
    if (found != NULL) {
        *copy = *found;
    }
    pthread_mutex_unlock(&memory_lock);
    return found != NULL;
}

static uintptr_t map(int descriptor, size_t size)
{
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return mapped == MAP_FAILED ? 0 : (uintptr_t)mapped;
}

static Result add(Allocation one, Address *address)
{
    Result result = OUT_OF_MEMORY;
    pthread_mutex_lock(&memory_lock);
    if (one.address != 0 && allocation_count < MAX_ALLOCATIONS) {
        one.id = ++last_id;
        one.is_vmm = one.id == 1 && getenv("FAKE_CUDA_FIRST_VMM") != NULL;
        allocations[allocation_count++] = one;
        *address = one.address;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

Result cuMemAlloc_v2(Address *address, size_t size)
{
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes_in_use + rounded > (size_t)setting("FAKE_CUDA_MEMORY", 8L << 30)) {
        return OUT_OF_MEMORY;
    }
    /* A file without a name: it goes with its processes, also when they are killed. */
    int descriptor = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, rounded) != 0) {
        return OUT_OF_MEMORY;
    }
    bytes_in_use += rounded;
    Allocation one = {
        .address = map(descriptor, rounded),
        .size = rounded,
        .device = device_of(current()),
        .descriptor = descriptor,
    };
    return add(one, address);
}

/* The pages stay mapped: a copy that is still queued must not end the process. */
static Result forget(Address address, int is_own)
{
    Result result = INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    Allocation *found = find(address);
    if (found != NULL && (found->descriptor >= 0) == is_own) {
        if (is_own) {
            bytes_in_use -= found->size;
            close(found->descriptor);
        }
        found->size = 0;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

Result cuMemFree_v2(Address address)
{
    return forget(address, 1);
}

Result cuMemGetAddressRange_v2(Address *base, size_t *size, Address address)
{
    Allocation found;
    if (!is_known(address, &found)) {
        return INVALID_VALUE;
    }
    if (base != NULL) {
        *base = found.address;
    }
    if (size != NULL) {
        *size = found.size;
    }
    return SUCCESS;
}

static Result pointer_attribute(void *value, int attribute, Address address)
{
    Allocation found = {.device = NO_DEVICE};
    int is_device = is_known(address, &found);
    switch (attribute) {
    case POINTER_CONTEXT:
        *(Context *)value = is_device ? &contexts[found.device] : NULL;
        break;
    case POINTER_MEMORY_TYPE:
        *(unsigned *)value = is_device ? MEMORY_TYPE_DEVICE : 0;
        break;
    case POINTER_DEVICE_POINTER:
        *(Address *)value = is_device ? address : 0;
        break;
    case POINTER_BUFFER_ID:
        *(unsigned long long *)value = found.id;
        break;
    case POINTER_IS_MANAGED:
        *(unsigned *)value = 0;
        break;
    case POINTER_DEVICE_ORDINAL:
        *(int *)value = found.device;
        break;
    case POINTER_IS_LEGACY_IPC_CAPABLE:
        *(int *)value = is_device && !found.is_vmm;
        break;
    case POINTER_MAPPED:
        *(int *)value = is_device;
        break;
    case POINTER_RANGE_START:
        *(Address *)value = found.address;
        break;
    case POINTER_RANGE_SIZE:
        *(size_t *)value = found.size;
        break;
    case POINTER_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)value = 0;
        break;
    case POINTER_MEMPOOL_HANDLE:
        *(void **)value = NULL;
        break;
    default:
        return INVALID_VALUE;
    }
    return SUCCESS;
}

Result cuPointerGetAttribute(void *value, int attribute, Address address)
{
    Allocation found;
    if (!is_known(address, &found)) {
        return INVALID_VALUE;
    }
    return pointer_attribute(value, attribute, address);
}

/* Unlike the above, succeeds for host memory, with zeros. */
Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, Address address)
{
    for (unsigned i = 0; i < count; i++) {
        pointer_attribute(values[i], attributes[i], address);
    }
    return SUCCESS;
}

Result cuPointerSetAttribute(const void *value, int attribute, Address address)
{
    (void)value;
    (void)attribute;
    Allocation found;
    return is_known(address, &found) ? SUCCESS : INVALID_VALUE;
}

Result cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    (void)address;
    (void)size;
    (void)flags;
    return current() != NULL ? SUCCESS : INVALID_CONTEXT;
}

Result cuMemHostUnregister(void *address)
{
    (void)address;
    return SUCCESS;
}

/* Memory of other processes ----------------------------------------------------------------- */

Result cuIpcGetMemHandle(Handle *handle, Address address)
{
    Allocation found;
    if (getenv("FAKE_CUDA_NO_IPC") != NULL) {
        return NOT_SUPPORTED;
    }
    if (!is_known(address, &found) || found.descriptor < 0 || found.is_vmm) {
        return INVALID_VALUE;
    }
    SharedMemory shared = {
        .process = getpid(),
        .descriptor = found.descriptor,
        .device = found.device,
        .size = found.size,
        .id = found.id,
    };
    memset(handle, 0, sizeof *handle);
    memcpy(handle->bytes, &shared, sizeof shared);
    handles_made++;
    return SUCCESS;
}

Result cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags)
{
    (void)flags;
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    if (getenv("FAKE_CUDA_NO_IPC") != NULL) {
        return NOT_SUPPORTED;
    }
    if (are_opens_held) {
        handles_awaited++;
    }
    while (are_opens_held) {
        usleep(1000);
    }
    SharedMemory shared;
    memcpy(&shared, handle.bytes, sizeof shared);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.process, shared.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        return INVALID_VALUE;
    }
    Allocation one = {
        .address = map(descriptor, shared.size),
        .size = shared.size,
        .device = device_of(current()), /* the memory's own may not be visible here */
        .descriptor = -1,
    };
    close(descriptor);
    handles_opened++;
    return add(one, address);
}

Result cuIpcCloseMemHandle(Address address)
{
    return forget(address, 0);
}

/* Streams and events ------------------------------------------------------------------------ */

typedef void (*Callback)(void *stream, Result result, void *argument);

typedef struct {
    long recorded; /* times that it was put into a stream */
    long reached;
} Event;

typedef struct Operation {
    enum { COPY, RECORD, WAIT, CALL } kind;
    void *target;
    const void *source;
    size_t size;
    Event *event;
    long number; /* of the recording */
    Callback callback;
    void *argument;
    struct Operation *next;
} Operation;

typedef struct {
    Operation *first;
    Operation *last;
    long posted;
    long ended;
    int device;
} Stream;

static Stream *streams[MAX_STREAMS]; /* destroyed ones too: their operations still run */
static int stream_count;
static Stream default_stream;
static int is_running;
static int is_stopping; /* the process ends */
static pthread_t runner;
static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t stream_changed = PTHREAD_COND_INITIALIZER;

static int can_run(const Stream *stream)
{
    const Operation *first = stream->first;
    return first != NULL && (first->kind != WAIT || first->event->reached >= first->number);
}

/* With `stream_lock` held; NULL if no stream has anything to do. */
static Stream *choose(unsigned *seed)
{
    Stream *ready[MAX_STREAMS];
    int count = 0;
    for (int i = 0; i < stream_count; i++) {
        if (can_run(streams[i])) {
            ready[count++] = streams[i];
        }
    }
    return count > 0 ? ready[rand_r(seed) % count] : NULL;
}

/* Without any lock: other calls go on meanwhile. */
static void execute(Stream *stream, Operation *operation)
{
    if (operation->kind == COPY) {
        memmove(operation->target, operation->source, operation->size);
    } else if (operation->kind == CALL) {
        operation->callback(stream, SUCCESS, operation->argument);
    }
}

static volatile long longest_delay = -1; /* in microseconds; negative: not set */

void fake_cuda_delay(long microseconds)
{
    longest_delay = microseconds;
}

static void *run_streams(void *unused)
{
    (void)unused;
    unsigned seed = (unsigned)setting("FAKE_CUDA_SEED", getpid());
    if (longest_delay < 0) {
        longest_delay = setting("FAKE_CUDA_DELAY_US", 0);
    }
    pthread_mutex_lock(&stream_lock);
    while (!is_stopping) {
        Stream *stream = choose(&seed);
        if (stream == NULL) {
            pthread_cond_wait(&stream_changed, &stream_lock);
            continue;
        }
        Operation *operation = stream->first;
        pthread_mutex_unlock(&stream_lock);
        if (longest_delay > 0 && operation->kind == COPY) {
            usleep((useconds_t)(rand_r(&seed) % longest_delay));
        }
        execute(stream, operation);
        pthread_mutex_lock(&stream_lock);
        if (operation->kind == RECORD) {
            operation->event->reached = operation->number;
        }
        copies_ended += operation->kind == COPY;
        stream->first = operation->next;
        if (stream->first == NULL) {
            stream->last = NULL;
        }
        stream->ended++;
        free(operation);
        pthread_cond_broadcast(&stream_changed);
    }
    pthread_mutex_unlock(&stream_lock);
    return NULL;
}

/* What is still queued is dropped: the memory of a copy may be freed, and the code of a callback
 * unloaded, while the process ends. */
static void stop_running(void)
{
    pthread_mutex_lock(&stream_lock);
    is_stopping = 1;
    pthread_cond_broadcast(&stream_changed);
    pthread_mutex_unlock(&stream_lock);
    if (!pthread_equal(pthread_self(), runner)) { /* a callback may call exit */
        pthread_join(runner, NULL);
    }
}

/* With `stream_lock` held. */
static void start_running(void)
{
    if (is_running) {
        return;
    }
    is_running = 1;
    streams[stream_count++] = &default_stream;
    pthread_create(&runner, NULL, run_streams, NULL);
    /* No destructor: those of UCX's libraries, which free its memory, run before that of this one.
     * All functions of atexit run before them. */
    atexit(stop_running);
}

/* 0, 1 and 2 are the default streams of CUDA. */
static Stream *real(Stream *stream)
{
    return (uintptr_t)stream > 2 ? stream : &default_stream;
}

static void post(Stream *stream, Operation operation)
{
    Operation *posted = malloc(sizeof *posted);
    *posted = operation;
    posted->next = NULL;
    pthread_mutex_lock(&stream_lock);
    start_running();
    if (posted->kind == RECORD) {
        posted->number = ++posted->event->recorded;
    } else if (posted->kind == WAIT) {
        posted->number = posted->event->recorded;
    }
    copies_posted += posted->kind == COPY;
    if (stream->last != NULL) {
        stream->last->next = posted;
    } else {
        stream->first = posted;
    }
    stream->last = posted;
    stream->posted++;
    pthread_cond_broadcast(&stream_changed);
    pthread_mutex_unlock(&stream_lock);
}

/* With `stream_lock` held: waits for all that is in the stream now. */
static void wait_for(Stream *stream)
{
    long posted = stream->posted;
    while (stream->ended < posted && !is_stopping) {
        pthread_cond_wait(&stream_changed, &stream_lock);
    }
}

Result cuStreamCreate(Stream **stream, unsigned flags)
{
    (void)flags;
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    Result result = OUT_OF_MEMORY;
    pthread_mutex_lock(&stream_lock);
    start_running();
    if (stream_count < MAX_STREAMS) {
        *stream = calloc(1, sizeof **stream);
        (*stream)->device = device_of(current());
        streams[stream_count++] = *stream;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&stream_lock);
    return result;
}

Result cuStreamDestroy_v2(Stream *stream)
{
    (void)stream;
    return SUCCESS;
}

Result cuStreamSynchronize(Stream *stream)
{
    pthread_mutex_lock(&stream_lock);
    wait_for(real(stream));
    pthread_mutex_unlock(&stream_lock);
    return SUCCESS;
}

Result cuCtxSynchronize(void)
{
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    pthread_mutex_lock(&stream_lock);
    for (int i = 0; i < stream_count; i++) {
        wait_for(streams[i]);
    }
    pthread_mutex_unlock(&stream_lock);
    return SUCCESS;
}

Result cuStreamAddCallback(Stream *stream, Callback callback, void *argument, unsigned flags)
{
    (void)flags;
    post(real(stream), (Operation){.kind = CALL, .callback = callback, .argument = argument});
    return SUCCESS;
}

Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags)
{
    (void)flags;
    post(real(stream), (Operation){.kind = WAIT, .event = event});
    return SUCCESS;
}

Result cuEventCreate(Event **event, unsigned flags)
{
    (void)flags;
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    *event = calloc(1, sizeof **event);
    return SUCCESS;
}

/* Not freed: a recording of it may still be queued. */
Result cuEventDestroy_v2(Event *event)
{
    (void)event;
    return SUCCESS;
}

Result cuEventRecord(Event *event, Stream *stream)
{
    post(real(stream), (Operation){.kind = RECORD, .event = event});
    return SUCCESS;
}

Result cuEventQuery(Event *event)
{
    pthread_mutex_lock(&stream_lock);
    Result result = event->reached >= event->recorded ? SUCCESS : NOT_READY;
    pthread_mutex_unlock(&stream_lock);
    return result;
}

/* Copies ------------------------------------------------------------------------------------ */

Result cuMemcpyAsync(Address target, Address source, size_t size, Stream *stream)
{
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    Operation copy = {
        .kind = COPY,
        .target = (void *)target,
        .source = (const void *)source,
        .size = size,
    };
    post(real(stream), copy);
    return SUCCESS;
}

Result cuMemcpyDtoDAsync_v2(Address target, Address source, size_t size, Stream *stream)
{
    return cuMemcpyAsync(target, source, size, stream);
}

Result cuMemcpyHtoD_v2(Address target, const void *source, size_t size)
{
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    memcpy((void *)target, source, size);
    return SUCCESS;
}

Result cuMemcpyDtoH_v2(void *target, Address source, size_t size)
{
    if (current() == NULL) {
        return INVALID_CONTEXT;
    }
    memcpy(target, (const void *)source, size);
    return SUCCESS;
}

/* The rest ---------------------------------------------------------------------------------- */

Result cuGetErrorString(Result result, const char **text)
{
    switch (result) {
    case INVALID_VALUE:
        *text = "invalid argument";
        break;
    case OUT_OF_MEMORY:
        *text = "out of memory";
        break;
    case INVALID_CONTEXT:
        *text = "invalid device context";
        break;
    case NOT_READY:
        *text = "device not ready";
        break;
    default:
        *text = "operation not supported";
    }
    return SUCCESS;
}

Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                           int *status)
{
    (void)version;
    (void)flags;
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *function = self != NULL ? dlsym(self, name) : NULL;
    if (status != NULL) {
        *status = *function == NULL;
    }
    return *function != NULL ? SUCCESS : NOT_FOUND;
}

Result cuMemRangeGetAttribute(void *value, size_t size, int attribute, Address address,
                              size_t count)
{
    (void)value;
    (void)size;
    (void)attribute;
    (void)address;
    (void)count;
    return INVALID_VALUE;
}

/* No memory here is from cuMemCreate: UCX takes the legacy handles above then. */
Result cuMemRetainAllocationHandle(void *handle, void *address)
{
    (void)handle;
    (void)address;
    return INVALID_VALUE;
}

/* UCX links these; none is called for such memory. */
#define ABSENT(name) \
    Result name(void) \
    { \
        return NOT_SUPPORTED; \
    }
ABSENT(cuMemAddressFree)
ABSENT(cuMemAddressReserve)
ABSENT(cuMemAllocManaged)
ABSENT(cuMemCreate)
ABSENT(cuMemExportToShareableHandle)
ABSENT(cuMemGetAllocationGranularity)
ABSENT(cuMemGetAllocationPropertiesFromHandle)
ABSENT(cuMemImportFromShareableHandle)
ABSENT(cuMemMap)
ABSENT(cuMemPoolDestroy)
ABSENT(cuMemPoolExportPointer)
ABSENT(cuMemPoolExportToShareableHandle)
ABSENT(cuMemPoolImportFromShareableHandle)
ABSENT(cuMemPoolImportPointer)
ABSENT(cuMemPoolSetAccess)
ABSENT(cuMemRelease)
ABSENT(cuMemSetAccess)
ABSENT(cuMemUnmap)
