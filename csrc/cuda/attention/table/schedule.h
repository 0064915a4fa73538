/* schedule.h: what widen.c tells schedule.c, which adds rows to plans and sizes. */
#pragma once

#include "cuda/attention/table/kernels.h"

/* Whether a run of a plan is faster if it widens its rows, and may have room for them. */
bool smla_wants_wide_rows(const smla_attention_shape *shape, const smla_attention_run *run);

/* Adds the bytes for the shape's rows to a workspace, where a call of this shape widens them. */
int64_t smla_add_wide_bytes(const smla_attention_shape *shape, int64_t bytes);
