/* schedule.h: how many splits the keys of a batch are cut into, and which kernel runs them. Pure
 * functions of shapes and of the device's facts.
 */
#pragma once

#include "cuda/attention/kernels.h"

/* What a schedule depends on. */
typedef struct smla_split_problem {
    const smla_cuda_device *device;
    const smla_attention_kernel *whole; /* runs the call when it is not split */
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
} smla_split_problem;

/* A way to run a batch, and its estimated time, which is counted in waves of CTAs. */
typedef struct smla_run_plan {
    const smla_attention_kernel *kernel;
    int num_splits;
    int64_t cost;
} smla_run_plan;

/* A plan for a batch. `rest` is the number of tokens in the batch's last run. If it is less than
 * all, the tokens in front run unsplit in full waves of CTAs, and the last `rest` tokens have a
 * plan of their own: that is estimated to take less time than one more wave. */
typedef struct smla_batch_plan {
    smla_run_plan run;
    int64_t rest;
} smla_batch_plan;

/* Returns false where no row of the kernel table fits. */
bool smla_find_problem(const smla_cuda_device *device, const smla_attention_shape *shape,
                       smla_kv_set formats, smla_split_problem *problem);

/* The plan with the shortest estimated time. */
smla_batch_plan smla_find_plan(const smla_split_problem *problem, int64_t num_tokens);

/* The columns of a split in both lists together (smla_split_columns). */
int64_t smla_count_columns(const smla_split_problem *problem, int num_splits);
