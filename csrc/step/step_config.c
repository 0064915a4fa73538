/* step_config.c: the rules of a config that concern one field. A plan checks the others. */
#include "step/step_config.h"

#include "core/rule.h"
#include "ops/check.h"

static smla_status
check_list(const char *op, const smla_config_field *field, char *config, smla_error *error)
{
    const int64_t *const numbers = (const void *)(config + field->offset);
    const int64_t count = *(const int64_t *)(const void *)(config + field->count);
    SMLA_TRY(smla_require_count(op, "num_ratios", count, 0, field->capacity, error));
    for (int64_t i = 0; i < count; i++) {
        SMLA_TRY(smla_require_count(op, field->name, numbers[i], field->least, field->most, error));
    }
    return SMLA_OK;
}

/* Checks the index of a name in its list. */
static smla_status
check_name(const char *op, const smla_config_field *field, const int32_t *index, smla_error *error)
{
    int most = 0;
    while (field->names[most + 1] != NULL) {
        most++;
    }
    return smla_require_count(op, field->name, *index, 0, most, error);
}

/* Checks rank, ranks and interleave. One rank has everything, as without ranks, so it becomes that.
 */
static smla_status
complete_share(const char *op, int64_t numbers[3], smla_error *error)
{
    smla_rank_share share;
    smla_checker c;
    smla_open_checker(&c, op, error);
    SMLA_TRY(smla_require_share(&c, numbers[0], numbers[1], numbers[2], &share));
    numbers[0] = share.rank;
    numbers[1] = share.size;
    numbers[2] = share.interleave;
    return SMLA_OK;
}

static smla_status
complete_field(const char *op, const smla_config_field *field, char *config, smla_error *error)
{
    void *const at = config + field->offset;
    int64_t *const count = at;
    double *const number = at;
    DLDevice *const device = at;
    switch (field->kind) {
    case SMLA_FIELD_COUNT:
        *count = *count == 0 ? (int64_t)field->standard : *count;
        return *count == 0 && field->is_optional
                   ? SMLA_OK
                   : smla_require_count(op, field->name, *count, field->least, field->most, error);
    case SMLA_FIELD_LIST:
    case SMLA_FIELD_BY_NUMBER: return check_list(op, field, config, error);
    case SMLA_FIELD_NUMBER:
    case SMLA_FIELD_SCALE:
        *number = *number == 0 ? field->standard : *number;
        return field->kind == SMLA_FIELD_SCALE
                   ? smla_require_positive(op, field->name, *number, error)
                   : smla_require_logit_factor(op, field->name, *number, error);
    case SMLA_FIELD_DEVICE: *device = smla_normal_device(*device); return SMLA_OK;
    case SMLA_FIELD_SHARE: return complete_share(op, at, error);
    case SMLA_FIELD_NAME: return check_name(op, field, at, error);
    case SMLA_FIELD_FORMAT:
    case SMLA_FIELD_PATH: return SMLA_OK;
    }
    return SMLA_OK;
}

smla_status
smla_complete_config(const char *op, const smla_config_field *fields, int num_fields, void *config,
                     smla_error *error)
{
    for (int i = 0; i < num_fields; i++) {
        SMLA_TRY(complete_field(op, &fields[i], config, error));
    }
    return SMLA_OK;
}
