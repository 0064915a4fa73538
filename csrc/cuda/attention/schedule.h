/* schedule.h: into how many splits the keys of a batch are cut, and by which kernel. Pure functions
 * of shapes and of the device's facts.
 */
#ifndef SMLA_CUDA_SCHEDULE_H
#define SMLA_CUDA_SCHEDULE_H

#include "cuda/attention/kernels.h"

/* What the schedule looks at. */
typedef struct smla_split_problem {
    const smla_cuda_device *device;
    const smla_attention_kernel *whole; /* of a call that is not split */
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
} smla_split_problem;

/* A way to run a batch, and its estimated time: CTAs run in waves. */
typedef struct smla_run_plan {
    const smla_attention_kernel *kernel;
    int num_splits;
    int64_t cost;
} smla_run_plan;

/* A plan for a batch. Of one split, `rest` tokens at the end may be left to a plan of their own,
 * because that is estimated to take less time than one more wave: all of them where they are the
 * only wave, or where nothing is left. */
typedef struct smla_batch_plan {
    smla_run_plan run;
    int64_t rest;
} smla_batch_plan;

/* False where no row fits. */
bool smla_find_problem(const smla_cuda_device *device, const smla_attention_shape *shape,
                       smla_kv_set formats, smla_split_problem *problem);

/* The plan with the shortest estimated time. */
smla_batch_plan smla_find_plan(const smla_split_problem *problem, int64_t num_tokens);

/* smla_split_columns of both lists. */
int64_t smla_count_columns(const smla_split_problem *problem, int num_splits);

#endif /* SMLA_CUDA_SCHEDULE_H */
