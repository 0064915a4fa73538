/* launchers.h: launchers that record their calls, for the table of kernels.c and run_attention.c,
 * and devices for schedule.c. Included once in a program.
 */
#pragma once

#include "cuda/attention/table/kernels.h"

#include "../testing.h"
#include "each_launcher.h"

typedef struct attention_launch {
    const char *launcher;
    smla_attention_params params;
    const smla_attention_kernel *combined; /* the kernel whose partial rows are combined, or NULL */
    int64_t cut_bytes;
    int64_t whole_tokens;
    int64_t tile_tokens;
    const uint8_t *wide; /* where widened rows begin, or NULL */
} attention_launch;

static attention_launch launches[8];
static int num_launches;
static int num_good_launches = -1; /* before one fails; negative: none fails */

static inline cudaError_t
write_launch(const char *launcher, const smla_attention_params *params,
             const smla_attention_kernel *combined, const smla_attention_start *start)
{
    EXPECT(num_launches < 8);
    if (num_launches < 8) {
        launches[num_launches++] = (attention_launch){launcher,
                                                      *params,
                                                      combined,
                                                      start->cut_bytes,
                                                      start->whole_tokens,
                                                      start->tile_tokens,
                                                      (const uint8_t *)start->wide};
    }
    const bool fails = num_good_launches == 0;
    num_good_launches -= num_good_launches >= 0;
    return fails ? cudaErrorLaunchFailure : cudaSuccess;
}

/* Only launches that a combine kernel follows are deferred for it. */
static inline cudaError_t
hold_launch(const char *launcher, const smla_attention_params *params,
            const smla_attention_start *start)
{
    const bool has_tiles = strncmp(launcher, "sm90_dense", strlen("sm90_dense")) == 0;
    EXPECT_EQ(start->deferred != NULL,
              params->results.num_splits > 1 || (has_tiles && start->cut_bytes > 0));
    if (start->deferred != NULL) {
        EXPECT(!start->deferred->is_full);
        start->deferred->is_full = true;
    }
    return write_launch(launcher, params, NULL, start);
}

#define LAUNCHER(name)                                                  \
    cudaError_t smla_attend_##name(const smla_attention_params *params, \
                                   const smla_attention_start *start)   \
    {                                                                   \
        return hold_launch(#name, params, start);                       \
    }

EACH_LAUNCHER(LAUNCHER)
LAUNCHER(sm90_widened_64)
LAUNCHER(sm90_mha)
LAUNCHER(sm80_mha)
LAUNCHER(sm90_paged)
LAUNCHER(sm80_paged)

cudaError_t
smla_cuda_launch_combine(const smla_attention_params *params, const smla_attention_kernel *kernel,
                         smla_cuda_deferred *deferred)
{
    EXPECT(deferred != NULL && deferred->is_full);
    return write_launch("combine", params, kernel, &(smla_attention_start){0});
}

static inline const char *
name_of_launcher(smla_attention_launcher *launch)
{
    const smla_attention_params params = {0};
    const attention_launch first = launches[0];
    const int former = num_launches;
    num_launches = 0;
    EXPECT_EQ((int)launch(&params, &(smla_attention_start){0}), (int)cudaSuccess);
    const char *const launcher = launches[0].launcher;
    launches[0] = first;
    num_launches = former;
    return launcher;
}

/* The name of a row's launcher. */
static inline const char *
launcher_of(const smla_attention_kernel *kernel)
{
    return name_of_launcher(kernel->launch);
}

enum { NUM_DEVICES = 2 };

static smla_cuda_device devices[NUM_DEVICES]; /* a device without SMs does not exist */

static const smla_cuda_device h200 = {.compute_capability = 90,
                                      .num_sms = 132,
                                      .max_shared_bytes = 232448};
static const smla_cuda_device a100 = {.compute_capability = 80,
                                      .num_sms = 108,
                                      .max_shared_bytes = 166912};
static const smla_cuda_device rtx4090 = {.compute_capability = 89,
                                         .num_sms = 128,
                                         .max_shared_bytes = 101376};

const smla_cuda_device *
smla_cuda_find_device(int32_t device_id)
{
    return device_id < NUM_DEVICES && devices[device_id].num_sms != 0 ? &devices[device_id] : NULL;
}
