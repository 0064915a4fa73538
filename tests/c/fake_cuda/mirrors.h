/* mirrors.h: mirror.c and events.c on the fake runtime of runtime.h. Allocations on the host are
 * counted and may fail, and device.c makes devices current. Included once in a program.
 */
#pragma once

#include <stdlib.h>

static void *test_calloc(size_t count, size_t size);
static void *test_malloc(size_t size);
static void test_free(void *memory);

#include "cuda/host/device.c" // NOLINT(bugprone-suspicious-include)
#define calloc test_calloc
#define malloc test_malloc
#define free   test_free
#include "cuda/host/events.c" // NOLINT(bugprone-suspicious-include)
#include "cuda/host/mirror.c" // NOLINT(bugprone-suspicious-include)
#undef calloc
#undef malloc
#undef free

#include "runtime.h"

static int num_good_allocations = -1; /* on the host, before one fails; negative: none fails */

static int num_live; /* live allocations on the host */

static inline bool
fails_now(void)
{
    const bool fails = num_good_allocations == 0;
    num_good_allocations -= num_good_allocations >= 0;
    return fails;
}

static inline void *
test_calloc(size_t count, size_t size)
{
    void *const memory = fails_now() ? NULL : calloc(count, size);
    num_live += memory != NULL;
    return memory;
}

static inline void *
test_malloc(size_t size)
{
    void *const memory = fails_now() ? NULL : malloc(size);
    num_live += memory != NULL;
    return memory;
}

static inline void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

static const char op[] = "MetadataBuilder.build";
static struct CUstream_st streams[4];

/* Two devices, of which 0 is current; streams 0 to 2 are of device 1, stream 3 is of device 0. The
 * driver's functions and the devices' facts have been looked up. */
static inline void
begin(void)
{
    reset_fake();
    fake.num_devices = 2;
    for (int i = 0; i < 4; i++) {
        streams[i] = (struct CUstream_st){.id = 10 + (unsigned long long)i, .device_id = i < 3};
    }
    smla_cuda_guard guard;
    EXPECT_OK(smla_cuda_enter(op, 1, &guard, &error));
    smla_cuda_leave(&guard);
    EXPECT_EQ(fake.current, 0);
    forget_calls();
}

static inline smla_stream
stream_at(int i)
{
    return (smla_stream){.device_id = 1, .handle = &streams[i]};
}

static inline void
destroy_all(smla_mirror *mirror)
{
    smla_cuda_destroy_mirror(mirror);
    EXPECT_EQ(fake.num_memory, 0);
    EXPECT_EQ(fake.num_host, 0);
    EXPECT_EQ(fake.num_events, 0);
    EXPECT_EQ(fake.num_streams, 0);
    EXPECT_EQ(num_live, 0);
    EXPECT_EQ(fake.current, 0);
    EXPECT_EQ((int)fake_mode, (int)cudaStreamCaptureModeGlobal);
}
