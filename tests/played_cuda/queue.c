/* Streams, events and the work on them. */
#include "played.h"
#include <unistd.h>

enum what { COPY, KERNEL, RECORD, WAIT_EVENT, WAIT_VALUE };

/* What the copy kernel (transport/cuda/kernel.py) is launched with, as it finds it. */
struct arguments {
    CUdeviceptr table, ids, stop;
    int32_t pairs, regions, chunks;
};
#define TILE_BYTES 16384

struct work {
    enum what what;
    CUdeviceptr target, source;
    size_t bytes;
    CUevent event;
    unsigned long turn;
    uint32_t value;
    struct arguments launch;
    unsigned programs;
    struct work *next;
};

struct stream { struct work *first, **last; CUresult failed; bool busy; };
struct event { unsigned long wanted, reached; CUstream stream; };

static struct stream default_stream;

static struct stream *queue_of(CUstream handle) {
    struct stream *queue = handle ? (struct stream *)handle : &default_stream;
    if (!queue->last) queue->last = &queue->first;
    return queue;
}

static struct event *event_of(CUevent handle) { return (struct event *)handle; }

static bool run_kernel(const struct work *work) {
    const struct arguments *a = &work->launch;
    /* A GPU could read these in host memory, too, but each program would wait for it in turn. */
    if (!is_device_memory(a->stop, 4) || !is_device_memory(a->table, (size_t)a->regions * 40)
        || !is_device_memory(a->ids, (size_t)a->pairs * 16))
        return false;
    if (*(int32_t *)a->stop) return true;
    const int64_t *table = (const int64_t *)a->table, *ids = (const int64_t *)a->ids;
    long tiles = (long)a->pairs * a->regions * a->chunks;
    for (long tile = 0; tile < tiles; tile++) {
        long fragment = tile / a->chunks, from = tile % a->chunks * TILE_BYTES;
        const int64_t *row = table + fragment % a->regions * 5;
        long pair = fragment / a->regions, bytes = row[4] - from;
        if (bytes <= 0) continue;
        if (bytes > TILE_BYTES) bytes = TILE_BYTES;
        CUdeviceptr source = (CUdeviceptr)(row[0] + ids[pair] * row[2] + from);
        CUdeviceptr target = (CUdeviceptr)(row[1] + ids[a->pairs + pair] * row[3] + from);
        if (!is_memory(source, (size_t)bytes) || !is_memory(target, (size_t)bytes)) return false;
        memmove((void *)target, (void *)source, (size_t)bytes);
    }
    return true;
}

/* Whether the work is done; a stream that failed stays failed, as a context does. */
static bool run(struct stream *queue, struct work *work) {
    struct event *event = event_of(work->event);
    switch (work->what) {
    case COPY:
        memmove((void *)work->target, (void *)work->source, work->bytes);
        return true;
    case KERNEL:
        if (!run_kernel(work)) queue->failed = 700; /* CUDA_ERROR_ILLEGAL_ADDRESS */
        return true;
    case RECORD:
        if (event->reached < work->turn) event->reached = work->turn;
        return true;
    case WAIT_EVENT:
        if (event->reached < work->turn) advance(event->stream);
        return event->reached >= work->turn;
    case WAIT_VALUE:
        return *(volatile uint32_t *)work->target == work->value;
    }
    abort();
}

bool advance(CUstream stream) {
    struct stream *queue = queue_of(stream);
    if (queue->busy) return false; /* two streams wait for each other's earlier work */
    queue->busy = true;
    for (struct work *work; (work = queue->first) && run(queue, work); free(work))
        if (!(queue->first = work->next)) queue->last = &queue->first;
    queue->busy = false;
    return !queue->first;
}

static CUresult put(CUstream stream, struct work work) {
    struct work *copy = malloc(sizeof work);
    *copy = work;
    copy->next = NULL;
    struct stream *queue = queue_of(stream);
    *queue->last = copy;
    queue->last = &copy->next;
    return CUDA_SUCCESS;
}

#define LOCKED(statement) \
    (pthread_mutex_lock(&played_lock), code = (statement), pthread_mutex_unlock(&played_lock), code)

EXPORTED CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    WANT(flags == 1);
    WANT_CONTEXT();
    *stream = calloc(1, sizeof(struct stream));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamDestroy(CUstream stream) {
    WANT(stream && stream != (CUstream)&default_stream);
    WANT_CONTEXT();
    return CUDA_SUCCESS; /* its work still ends: the memory stays */
}

EXPORTED CUresult cuStreamSynchronize(CUstream stream) {
    WANT_CONTEXT();
    for (bool done = false; !done; usleep(100)) {
        pthread_mutex_lock(&played_lock);
        done = advance(stream);
        pthread_mutex_unlock(&played_lock);
        if (done) break;
    }
    return queue_of(stream)->failed;
}

EXPORTED CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CUresult code;
    WANT(event && flags == 0);
    WANT_CONTEXT();
    return LOCKED(put(stream, (struct work){
        .what = WAIT_EVENT, .event = event, .turn = event_of(event)->wanted}));
}

EXPORTED CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                      unsigned flags) {
    CUresult code;
    WANT_CONTEXT();
    WANT(is_memory(address, 4) && flags == 1);
    return LOCKED(put(stream, (struct work){
        .what = WAIT_VALUE, .target = address, .value = value}));
}

EXPORTED CUresult cuEventCreate(CUevent *event, unsigned flags) {
    WANT(flags == 3); /* CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING */
    WANT_CONTEXT();
    *event = calloc(1, sizeof(struct event));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventDestroy(CUevent event) {
    WANT(event);
    WANT_CONTEXT();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventRecord(CUevent event, CUstream stream) {
    CUresult code;
    WANT(event);
    WANT_CONTEXT();
    event_of(event)->stream = stream;
    return LOCKED(put(stream, (struct work){
        .what = RECORD, .event = event, .turn = ++event_of(event)->wanted}));
}

EXPORTED CUresult cuEventQuery(CUevent event) {
    WANT(event);
    WANT_CONTEXT();
    pthread_mutex_lock(&played_lock);
    if (event_of(event)->reached < event_of(event)->wanted) advance(event_of(event)->stream);
    bool done = event_of(event)->reached >= event_of(event)->wanted;
    CUresult failed = queue_of(event_of(event)->stream)->failed;
    pthread_mutex_unlock(&played_lock);
    return failed ? failed : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORTED CUresult cuEventSynchronize(CUevent event) {
    CUresult code;
    while ((code = cuEventQuery(event)) == CUDA_ERROR_NOT_READY) usleep(100);
    return code;
}

EXPORTED CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                                CUstream stream) {
    CUresult code;
    WANT_CONTEXT();
    WANT(is_memory(target, bytes) && is_memory(source, bytes));
    return LOCKED(put(stream, (struct work){
        .what = COPY, .target = target, .source = source, .bytes = bytes}));
}

/* cuMemcpyBatchAsync as it was until CUDA 13, where it lost ``failed``. */
CUresult batch_of_cuda_12(CUdeviceptr *targets, CUdeviceptr *sources, size_t *bytes, size_t count,
                          CUmemcpyAttributes *attributes, size_t *first, size_t kinds,
                          size_t *failed, CUstream stream) {
    WANT(stream && failed && count > 0);
    WANT(kinds == 1 && first[0] == 0 && (int)attributes[0].srcAccessOrder == 1);
    WANT(!attributes[0].flags && !attributes[0].srcLocHint.type && !attributes[0].dstLocHint.type);
    for (size_t i = 0; i < count; i++) {
        CUresult code = cuMemcpyAsync(targets[i], sources[i], bytes[i], stream);
        if (code) return *failed = i, code;
    }
    return CUDA_SUCCESS;
}

/* -- kernels */

EXPORTED CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    WANT_CONTEXT();
    if (memcmp(image, "\177ELF", 4)) REFUSE(CUDA_ERROR_INVALID_IMAGE, "no cubin");
    *module = (CUmodule)&default_stream;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    WANT_CONTEXT();
    WANT(module == (CUmodule)&default_stream);
    if (strcmp(name, "_copy_kernel")) return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)&default_stream;
    return CUDA_SUCCESS;
}

/* Whether the function's code was loaded: without that the first launch would do it. */
static bool loaded;

EXPORTED CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    WANT_CONTEXT();
    WANT(function == (CUfunction)&default_stream && which == CU_FUNC_ATTRIBUTE_NUM_REGS);
    loaded = true;
    *value = 32;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z,
                                 unsigned threads, unsigned threads_y, unsigned threads_z,
                                 unsigned shared, CUstream stream, void **values, void **extra) {
    CUresult code;
    struct arguments a;
    WANT_CONTEXT();
    WANT(function == (CUfunction)&default_stream && x > 0 && y == 1 && z == 1);
    WANT(loaded);
    WANT(threads == 256 && threads_y == 1 && threads_z == 1 && shared == 0 && !extra && values);
    void *into[] = {&a.table, &a.ids, &a.stop, &a.pairs, &a.regions, &a.chunks};
    for (int i = 0; i < 6; i++) memcpy(into[i], values[i], i < 3 ? 8 : 4);
    for (int i = 6; i < 8; i++) WANT(*(uint64_t *)values[i] == 0); /* triton's scratch memories */
    return LOCKED(put(stream, (struct work){.what = KERNEL, .launch = a, .programs = x}));
}
