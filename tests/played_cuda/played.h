/* libcuda.so.1 played in host memory, so that the real cuda-bindings can be called without a GPU.
 *
 * What is checked is the form of every call: that names exist, that arguments arrive where the
 * driver looks for them, that flags and structures are filled as CUDA wants them.  Memory is a
 * memfd each; other processes open it by pid and descriptor, as long as its process lives.  Work
 * on a stream runs in order when somebody looks, as in tests/doubles/cuda_fake.py.
 */
#pragma once
#if __has_include(<cuda.h>)
#include <cuda.h>
#else
#include "cuda_words.h"
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define DEVICES 2
#define PAGE_BYTES ((size_t)1 << 21)

/* Say what was wrong with a call, and fail it. */
#define REFUSE(code, why) \
    return fprintf(stderr, "played CUDA: %s: %s\n", __func__, why), (code)
#define WANT(condition) \
    if (!(condition)) REFUSE(CUDA_ERROR_INVALID_VALUE, "not " #condition)
#define WANT_CONTEXT() \
    if (current_device() < 0) REFUSE(CUDA_ERROR_INVALID_CONTEXT, "no context")

extern pthread_mutex_t played_lock;
int current_device(void);

/* Whether all of [address, address + bytes) is memory of this process that was handed out. */
bool is_memory(CUdeviceptr address, size_t bytes);
bool is_device_memory(CUdeviceptr address, size_t bytes);

/* Run what can run of a stream's queue; whether all of it ran.  Under played_lock. */
bool advance(CUstream stream);
