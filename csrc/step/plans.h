/* plans.h: the list of plans. A row makes the functions of a builder's public API (builders.c).
 */
#pragma once

#include "sparse_mla/dense_step.h"
#include "sparse_mla/paged_step.h"
#include "sparse_mla/step.h"
#include "sparse_mla/v4_step.h"
#include "step/engine.h"

/* X(name, type of the builder, config, args of a build, metadata) */
#define SMLA_STEP_PLANS(X)                                                                      \
    X(v32, smla_builder, smla_builder_config, smla_build_args, smla_metadata)                   \
    X(v4, smla_v4_builder, smla_v4_config, smla_v4_build_args, smla_v4_metadata)                \
    X(dense, smla_dense_builder, smla_dense_config, smla_dense_build_args, smla_dense_metadata) \
    X(paged, smla_paged_builder, smla_paged_config, smla_paged_build_args, smla_paged_metadata)

/* Pv of a dense step's config. */
int64_t smla_dense_value_dim(const smla_dense_builder *builder);

#define SMLA_DECLARE_PLAN(name, builder, config, args, metadata) \
    extern const smla_step_plan smla_##name##_plan;

SMLA_STEP_PLANS(SMLA_DECLARE_PLAN)
