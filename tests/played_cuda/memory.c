/* Memory: one memfd per allocation, mapped where the process got it. */
#define _GNU_SOURCE
#include "played.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum kind { FREE, PLAIN, POOL, HOST, REGISTERED, PEER, RESERVED, VMM };

struct area {
    enum kind kind;
    CUdeviceptr base;
    size_t bytes, wanted; /* wanted: what was asked for, which is what the driver tells */
    int fd;
    unsigned serial;
    int protection;
    CUmemGenericAllocationHandle handle;
    void *host; /* REGISTERED: where the process has the memory itself */
};

struct physical { int fd, users, types; size_t bytes; };

#define MOST 8192
static struct area areas[MOST];
static int used; /* none lies behind the first so many */
static struct physical physicals[MOST]; /* number 0 is nobody's */

static struct area *area_at(CUdeviceptr address) {
    struct area *found = NULL;
    for (struct area *a = areas; a < areas + used; a++)
        if (a->kind && a->base <= address && address < a->base + a->bytes
            && (!found || a->kind == VMM)) /* what is mapped comes before what is reserved */
            found = a;
    return found;
}

bool is_memory(CUdeviceptr address, size_t bytes) {
    while (bytes) {
        struct area *area = area_at(address);
        if (!area || area->kind == RESERVED || !area->protection) return false;
        size_t here = area->base + area->bytes - address;
        if (here >= bytes) return true;
        address += here, bytes -= here;
    }
    return true;
}

bool is_device_memory(CUdeviceptr address, size_t bytes) {
    if (!is_memory(address, bytes)) return false;
    enum kind kind = area_at(address)->kind;
    return kind != HOST && kind != REGISTERED;
}

static struct area *new_area(enum kind kind, CUdeviceptr base, size_t bytes, int fd) {
    static unsigned serial;
    struct area *a = areas;
    while (a->kind)
        if (++a == areas + MOST) abort();
    if (a == areas + used) used++;
    *a = (struct area){kind, base, bytes, bytes, fd, ++serial, PROT_READ | PROT_WRITE, 0, NULL};
    return a;
}

static CUresult take(enum kind kind, CUdeviceptr *address, size_t bytes) {
    WANT(bytes > 0);
    WANT_CONTEXT();
    size_t rounded = kind == HOST ? bytes : (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    int fd = memfd_create("played-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)rounded)) return CUDA_ERROR_OUT_OF_MEMORY;
    void *pages = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&played_lock);
    new_area(kind, (CUdeviceptr)pages, rounded, fd)->wanted = bytes;
    pthread_mutex_unlock(&played_lock);
    *address = (CUdeviceptr)pages;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    return take(PLAIN, address, bytes);
}

static size_t pool_threshold;

EXPORTED CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *wanted) {
    if (getenv("PLAYED_CUDA_NO_POOLS")) return CUDA_ERROR_NOT_SUPPORTED;
    WANT(wanted && (int)wanted->allocType == 1 && (int)wanted->location.type == 1);
    WANT(wanted->location.id >= 0 && wanted->location.id < DEVICES);
    WANT((int)wanted->handleTypes == CU_MEM_HANDLE_TYPE_NONE && !wanted->maxSize);
    *pool = (CUmemoryPool)&pool_threshold;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value) {
    WANT(pool == (CUmemoryPool)&pool_threshold && which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
    pool_threshold = *(cuuint64_t *)value;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                          CUstream stream) {
    WANT(pool == (CUmemoryPool)&pool_threshold && pool_threshold > 0 && stream);
    return take(POOL, address, bytes);
}

EXPORTED CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    WANT(flags == 3);
    return take(HOST, (CUdeviceptr *)address, bytes);
}

static void drop(struct area *area) {
    munmap((void *)area->base, area->bytes);
    if (area->fd >= 0) close(area->fd);
    area->kind = FREE;
}

EXPORTED CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    WANT(stream);
    WANT_CONTEXT();
    pthread_mutex_lock(&played_lock);
    struct area *area = area_at(address);
    bool own = area && area->kind == POOL && area->base == address;
    if (own) drop(area);
    pthread_mutex_unlock(&played_lock);
    WANT(own);
    return CUDA_SUCCESS;
}

/* -- host memory that the process has mapped itself: the GPU sees it somewhere else */

static bool may_be_written(void *address) {
    char line[256], rights[5];
    uintptr_t first, end;
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !found && fgets(line, sizeof line, maps))
        found = sscanf(line, "%lx-%lx %4s", &first, &end, rights) == 3
                && first <= (uintptr_t)address && (uintptr_t)address < end;
    if (maps) fclose(maps);
    return found && rights[1] == 'w';
}

static struct area *registered_at(void *host) {
    for (struct area *a = areas; a < areas + used; a++)
        if (a->kind == REGISTERED && a->host == host) return a;
    return NULL;
}

EXPORTED CUresult cuMemHostRegister(void *host, size_t bytes, unsigned flags) {
    WANT_CONTEXT();
    WANT(bytes > 0 && (uintptr_t)host % 4096 == 0);
    WANT(flags == 3 || flags == (3 | 8)); /* PORTABLE | DEVICEMAP, READ_ONLY */
    WANT(flags & 8 || may_be_written(host));
    if (getenv("PLAYED_CUDA_NO_READ_ONLY_HOST") && flags & 8) return CUDA_ERROR_NOT_SUPPORTED;
    if (registered_at(host)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    void *pages = mremap(host, 0, bytes, MREMAP_MAYMOVE); /* the same pages once more */
    WANT(pages != MAP_FAILED);
    pthread_mutex_lock(&played_lock);
    struct area *area = new_area(REGISTERED, (CUdeviceptr)pages, bytes, -1);
    area->host = host, area->protection = flags & 8 ? PROT_READ : PROT_READ | PROT_WRITE;
    pthread_mutex_unlock(&played_lock);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *host, unsigned flags) {
    WANT_CONTEXT();
    WANT(flags == 0);
    struct area *area = registered_at(host);
    WANT(area);
    *address = area->base;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemHostUnregister(void *host) {
    WANT_CONTEXT();
    pthread_mutex_lock(&played_lock);
    struct area *area = registered_at(host);
    if (area) drop(area);
    pthread_mutex_unlock(&played_lock);
    WANT(area);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    WANT_CONTEXT();
    struct area *area = area_at(address);
    if (!area || area->kind == RESERVED) return CUDA_ERROR_NOT_FOUND;
    if (getenv("PLAYED_CUDA_NO_RANGE")) return CUDA_ERROR_NOT_FOUND;
    *base = area->base, *bytes = area->wanted;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which,
                                        CUdeviceptr address) {
    WANT_CONTEXT();
    struct area *area = area_at(address);
    if (!area || area->kind == RESERVED) return CUDA_ERROR_INVALID_VALUE;
    WANT(which == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || which == CU_POINTER_ATTRIBUTE_RANGE_SIZE);
    if (which == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *(CUdeviceptr *)value = area->base;
    else *(size_t *)value = area->wanted;
    return CUDA_SUCCESS;
}

/* -- other processes' memory */

struct ticket { char magic[8]; int pid, fd; size_t bytes; unsigned serial; };

static int open_of(const struct ticket *ticket) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket->pid, ticket->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

EXPORTED CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    WANT_CONTEXT();
    struct area *area = area_at(address);
    if (!area || area->kind != PLAIN) return CUDA_ERROR_INVALID_VALUE;
    struct ticket ticket = {"played!", getpid(), area->fd, area->bytes, area->serial};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    struct ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    WANT(flags == 1);
    WANT(!memcmp(ticket.magic, "played!", 8));
    WANT_CONTEXT();
    if (ticket.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    for (struct area *a = areas; a < areas + used; a++)
        if (a->kind == PEER && a->serial == ticket.serial && a->handle == (unsigned)ticket.pid)
            REFUSE(CUDA_ERROR_ALREADY_MAPPED, "opened a second time");
    int fd = open_of(&ticket);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    void *pages = mmap(NULL, ticket.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED) return close(fd), CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&played_lock);
    struct area *area = new_area(PEER, (CUdeviceptr)pages, ticket.bytes, fd);
    area->serial = ticket.serial, area->handle = (unsigned)ticket.pid;
    pthread_mutex_unlock(&played_lock);
    *address = (CUdeviceptr)pages;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    WANT_CONTEXT();
    pthread_mutex_lock(&played_lock);
    struct area *area = area_at(address);
    bool opened = area && area->kind == PEER && area->base == address;
    if (opened) drop(area);
    pthread_mutex_unlock(&played_lock);
    WANT(opened);
    return CUDA_SUCCESS;
}

/* -- virtual memory */

static bool fits(const CUmemAllocationProp *wanted) {
    return wanted && wanted->type == 1 && wanted->location.type == 1
           && wanted->location.id >= 0 && wanted->location.id < DEVICES;
}

EXPORTED CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
                                                CUmemAllocationGranularity_flags which) {
    WANT(fits(wanted) && which == 0);
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

static CUresult adopt(CUmemGenericAllocationHandle *handle, int fd, size_t bytes, int types) {
    for (unsigned i = 1; i < MOST; i++)
        if (!physicals[i].users) {
            physicals[i] = (struct physical){fd, 1, types, bytes};
            *handle = i;
            return CUDA_SUCCESS;
        }
    abort();
}

EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                              const CUmemAllocationProp *wanted, unsigned long long flags) {
    WANT(fits(wanted) && flags == 0 && bytes % PAGE_BYTES == 0);
    int types = (int)wanted->requestedHandleTypes;
    WANT(types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || types == CU_MEM_HANDLE_TYPE_FABRIC);
    int fd = memfd_create("played-vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    return adopt(handle, fd, bytes, types);
}

static bool is_physical(CUmemGenericAllocationHandle handle) {
    return handle > 0 && handle < MOST && physicals[handle].users > 0;
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    WANT(is_physical(handle));
    if (!--physicals[handle].users) close(physicals[handle].fd);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                      CUdeviceptr wanted, unsigned long long flags) {
    WANT(bytes % PAGE_BYTES == 0 && alignment == 0 && wanted == 0 && flags == 0);
    void *pages = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    new_area(RESERVED, (CUdeviceptr)pages, bytes, -1);
    *address = (CUdeviceptr)pages;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    struct area *area = area_at(address);
    WANT(area && area->kind == RESERVED && area->base == address && area->bytes == bytes);
    drop(area);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                           CUmemGenericAllocationHandle handle, unsigned long long flags) {
    WANT(is_physical(handle) && offset == 0 && flags == 0 && bytes == physicals[handle].bytes);
    struct area *area = area_at(address);
    WANT(area && area->kind == RESERVED && address + bytes <= area->base + area->bytes);
    void *pages = mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                       physicals[handle].fd, 0);
    WANT(pages != MAP_FAILED);
    physicals[handle].users++;
    area = new_area(VMM, address, bytes, -1);
    area->handle = handle, area->protection = PROT_NONE;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct area *area = area_at(address);
    WANT(area && area->kind == VMM && area->base == address && area->bytes == bytes);
    mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    area->kind = FREE;
    return cuMemRelease(area->handle);
}

EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                                 size_t count) {
    WANT(count == 1 && access->location.type == 1 && access->location.id < DEVICES);
    int flags = (int)access->flags;
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ && getenv("PLAYED_CUDA_NO_READ_ONLY"))
        return CUDA_ERROR_INVALID_VALUE;
    WANT(flags == CU_MEM_ACCESS_FLAGS_PROT_READ || flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    int wanted = flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    WANT(!mprotect((void *)address, bytes, wanted));
    for (CUdeviceptr at = address; at < address + bytes; at += area_at(at)->bytes) {
        WANT(area_at(at)->kind == VMM);
        area_at(at)->protection = wanted;
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    struct area *area = area_at((CUdeviceptr)address);
    if (!area || area->kind != VMM) return CUDA_ERROR_INVALID_VALUE;
    *handle = area->handle;
    physicals[*handle].users++;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                               CUmemAllocationHandleType type,
                                               unsigned long long flags) {
    WANT(is_physical(handle) && flags == 0);
    if (physicals[handle].types != (int)type) return CUDA_ERROR_INVALID_VALUE;
    if ((int)type == CU_MEM_HANDLE_TYPE_FABRIC) {
        struct ticket ticket = {"fabric!", getpid(), physicals[handle].fd, 0, 0};
        memset(shareable, 0, sizeof(CUmemFabricHandle));
        memcpy(shareable, &ticket, sizeof ticket);
        return CUDA_SUCCESS;
    }
    *(int *)shareable = fcntl(physicals[handle].fd, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                                 CUmemAllocationHandleType type) {
    WANT(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || type == CU_MEM_HANDLE_TYPE_FABRIC);
    int fd;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        struct ticket ticket;
        memcpy(&ticket, shared, sizeof ticket);
        WANT(!memcmp(ticket.magic, "fabric!", 8));
        fd = open_of(&ticket);
    } else {
        fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
    }
    WANT(fd >= 0);
    return adopt(handle, fd, (size_t)lseek(fd, 0, SEEK_END), (int)type);
}
