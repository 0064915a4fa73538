/* test_sizes.c: sizes of 0 and below, in every option of every operator: the call says which option
 * it is, or the value has a meaning.
 */
#include "numbers.h"

/* Whether a value has a meaning, which other arguments need not fit. */
static bool
is_meant(const size_option *option, int64_t value)
{
    return option->meant & UNREAD || (value == 0 && option->meant & ZERO) ||
           (value == -1 && option->meant & MINUS_ONE);
}

static void
try_size(const size_option *option, int64_t value)
{
    const operator_case *const op = &operators[option->number];
    any_args args = op->make();
    char start[100];
    char name[100];
    memcpy((uint8_t *)&args + option->offset, &value, sizeof value);
    if (op->call == call_mla_attention) { /* read only so */
        args.mla.has_window = 1;
        args.mla.cp_size += args.mla.cp_size == 0 && option->offset == AT_FIELD(mla, cp_rank);
    } else if (op->call == call_varlen_attention) {
        args.varlen.has_window = 1;
    } else if (op->call == call_paged_attention) {
        args.paged.has_window = 1;
        args.paged.cp_size += args.paged.cp_size == 0 && option->offset == AT_FIELD(paged, cp_rank);
        if (args.paged.cp_rank != 0 || args.paged.cp_size != 0 || args.paged.cp_interleave != 0) {
            args.paged.cache_leftpad = NULL;
        }
    }
    snprintf(start, sizeof start, "%s: `", op->name);
    snprintf(name, sizeof name, "`%s`", option->name);
    const smla_status status = op->call(&args, &error);
    EXPECT(status == SMLA_ERROR_VALUE || (status == SMLA_OK && is_meant(option, value)));
    if (status != SMLA_OK) {
        EXPECT_EQ(strncmp(error.text, start, strlen(start)), 0);
        EXPECT(strstr(error.text, name) != NULL || is_meant(option, value));
    }
    free_arrays(op->name);
}

static void
test_operators(void)
{
    const int64_t values[] = {0, -1, -2, INT32_MIN, INT64_MIN};
    for (int i = 0; i < NUM_SIZES; i++) {
        for (size_t j = 0; j < sizeof values / sizeof values[0]; j++) {
            const int before = failures;
            try_size(&sizes[i], values[j]);
            if (failures != before) {
                printf("    %s, %s = %lld: %s\n", operators[sizes[i].number].name, sizes[i].name,
                       (long long)values[j], error.text);
            }
        }
    }
}

int
main(void)
{
    RUN(test_operators);
    return report("test_sizes");
}
