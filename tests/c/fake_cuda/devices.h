/* devices.h: device.c on the fake runtime of runtime.h, with two devices, a stream of each, and at
 * most one environment variable. Included once in a program.
 */
#pragma once

#include <stdlib.h>

static char *test_getenv(const char *name);

#define getenv test_getenv
#include "cuda/host/device.c" // NOLINT(bugprone-suspicious-include)
#undef getenv

#include "runtime.h"

/* The one environment variable that is set. */
static const char *env_name;
static const char *env_text;

static inline char *
test_getenv(const char *name)
{
    return env_name != NULL && strcmp(name, env_name) == 0 ? (char *)env_text : NULL;
}

static inline void
set_env(const char *name, const char *text)
{
    env_name = name;
    env_text = text;
}

static const char op[] = "some_op";
static struct CUstream_st streams[2];

/* The state of a new process that knows the driver's functions: two devices, 0 is current. */
static inline void
begin(void)
{
    reset_fake();
    memset(slots, 0, sizeof slots);
    fake.num_devices = 2;
    set_env(NULL, NULL);
    for (int i = 0; i < 2; i++) {
        streams[i] = (struct CUstream_st){.id = 10 + (unsigned long long)i, .device_id = i};
    }
}
