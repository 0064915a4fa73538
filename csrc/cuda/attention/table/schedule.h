/* schedule.h: what widen.c adds to the plans and sizes of schedule.c. */
#pragma once

#include "cuda/attention/table/kernels.h"

/* Lets those runs of a plan widen rows that are faster for it and have room. */
void smla_widen_runs(const smla_attention_shape *shape, smla_attention_plan *plan);

/* Adds the bytes for the shape's rows to a workspace, where a call of this shape widens them. */
int64_t smla_add_wide_bytes(const smla_attention_shape *shape, int64_t bytes);
