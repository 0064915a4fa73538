/* builders.c: the public functions of the plans' builders, each of which is an smla_step. */
#include "core/rule.h"
#include "step/plans.h"

#define DEFINE_BUILDER(name, builder, config, args, metadata_type)                             \
    smla_status builder##_create(const config *given, builder **made, smla_error *error)       \
    {                                                                                          \
        smla_step *step = NULL;                                                                \
        SMLA_TRY(smla_require_pointer(smla_create_op, "builder", made, error));                \
        SMLA_TRY(smla_create_step(&smla_##name##_plan, given, &step, error));                  \
        *made = (builder *)step;                                                               \
        return SMLA_OK;                                                                        \
    }                                                                                          \
                                                                                               \
    smla_status builder##_build(builder *b, const args *given, const metadata_type **metadata, \
                                smla_error *error)                                             \
    {                                                                                          \
        const smla_status status = smla_build_step((smla_step *)b, given, error);              \
        if (status == SMLA_OK && metadata != NULL) {                                           \
            *metadata = (const void *)((char *)b + smla_##name##_plan.metadata);               \
        }                                                                                      \
        return status;                                                                         \
    }                                                                                          \
                                                                                               \
    void builder##_destroy(builder *b)                                                         \
    {                                                                                          \
        smla_destroy_step((smla_step *)b);                                                     \
    }                                                                                          \
                                                                                               \
    int64_t builder##_workspace_bytes(const builder *b)                                        \
    {                                                                                          \
        return smla_step_workspace_bytes((const smla_step *)b);                                \
    }

SMLA_STEP_PLANS(DEFINE_BUILDER)
