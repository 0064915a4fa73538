/* test_args.c: args structs of older and newer callers, and calls with NULL.
 *
 * Structs are put into memory of exactly their size, so that AddressSanitizer sees a read past
 * them.
 */
#include "operators.h"

/* A copy of the args in a struct of `size` bytes. Bytes behind the known ones are `tail`. */
static any_args *
resize(const any_args *args, size_t known, size_t size, int tail)
{
    uint8_t *bytes = malloc(size);
    if (bytes == NULL) {
        exit(2);
    }
    memset(bytes, tail, size);
    memcpy(bytes, args, size < known ? size : known);
    memcpy(bytes, &size, sizeof size < size ? sizeof size : size);
    return (any_args *)(void *)bytes;
}

static void
test_struct_size(void)
{
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        const any_args good = op->make();
        const size_t known = op->args_bytes;
        /* A newer caller, who uses none of the fields that are new to us. */
        any_args *args = resize(&good, known, known + 24, 0);
        EXPECT_OK(op->call(args, &error));
        free(args);
        args = resize(&good, known, 4096, 0); /* the largest size that is accepted */
        EXPECT_OK(op->call(args, &error));
        free(args);
        args = resize(&good, known, known + 24, 0);
        ((uint8_t *)args)[known + 23] = 1;
        EXPECT_FAIL(op->call(args, &error), SMLA_ERROR_VALUE,
                    "args must use fields that this version (0.1.0) knows");
        EXPECT(strncmp(error.text, title_of(op), strlen(title_of(op))) == 0);
        free(args);
        /* An older caller, whose struct ends before the stream. */
        args = resize(&good, known, known - sizeof(void *), 0);
        EXPECT_OK(op->call(args, &error));
        free(args);
        /* A struct that holds nothing but its size, so the first array is missing. */
        args = resize(&good, known, sizeof(size_t), 0);
        EXPECT_FAIL(op->call(args, &error), SMLA_ERROR_VALUE, "` must be given, got none");
        free(args);
        free_arrays(op->name);
    }
}

static void
test_bad_struct_size(void)
{
    const size_t sizes[] = {0, 1, sizeof(size_t) - 1, SIZE_MAX, 1u << 20, 4097};
    for (int i = 0; i < NUM_OPERATORS; i++) {
        const operator_case *op = &operators[i];
        any_args args = op->make();
        for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            args.struct_size = sizes[k]; /* as where the caller has not set it */
            EXPECT_FAIL(op->call(&args, &error), SMLA_ERROR_VALUE,
                        "`struct_size` must be set to sizeof args");
            EXPECT(strncmp(error.text, title_of(op), strlen(title_of(op))) == 0);
        }
        EXPECT_FAIL(op->call(NULL, &error), SMLA_ERROR_VALUE, "`struct_size` must be set");
        EXPECT_EQ(op->call(NULL, NULL), SMLA_ERROR_VALUE);
        free_arrays(op->name);
    }
}

/* Calls that are no operators, without the pointers that they need. */
static void
test_null(void)
{
    int64_t bytes = 0;
    smla_builder *builder = NULL;
    const smla_metadata *metadata = NULL;
    smla_batch_split split;
    int64_t ends[1];
    int64_t count;
    const int32_t starts[] = {0, 1};
    EXPECT_FAIL(smla_attention_workspace_size(NULL, &bytes, &error), SMLA_ERROR_VALUE,
                "attention_workspace_size: `struct_size` must");
    EXPECT_FAIL(smla_builder_create(NULL, &builder, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder: `struct_size` must");
    const smla_builder_config config = {.struct_size = sizeof config};
    EXPECT_FAIL(smla_builder_create(&config, NULL, &error), SMLA_ERROR_VALUE, "`builder` must");
    EXPECT_FAIL(smla_builder_build(NULL, NULL, &metadata, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `");
    EXPECT_FAIL(smla_forward(NULL, &error), SMLA_ERROR_VALUE, "forward: `struct_size` must");
    EXPECT_FAIL(smla_split_decodes_and_prefills(starts, 1, 1, 1, 1, NULL, &error), SMLA_ERROR_VALUE,
                "`split` must be given");
    EXPECT_FAIL(smla_split_prefill_chunks(NULL, 1, 9, ends, &count, &error), SMLA_ERROR_VALUE,
                "`seq_lens` must be given");
    EXPECT_FAIL(smla_split_prefill_chunks(starts, 1, 9, NULL, &count, &error), SMLA_ERROR_VALUE,
                "`ends` must be given");
    EXPECT_FAIL(smla_split_prefill_chunks(starts, 1, 9, ends, NULL, &error), SMLA_ERROR_VALUE,
                "`num_chunks` must be given");
    smla_context_chunk chunk;
    int64_t num_entries;
    int32_t first, len;
    const smla_context_args context = {.struct_size = sizeof context,
                                       .context_lens = starts + 1,
                                       .num_prefills = 1,
                                       .workspace_tokens = 4,
                                       .block_size = 2};
    EXPECT_FAIL(smla_split_context_chunks(NULL, NULL, NULL, NULL, &count, &num_entries, &error),
                SMLA_ERROR_VALUE, "split_context_chunks: `struct_size` must");
    EXPECT_FAIL(smla_split_context_chunks(&context, NULL, NULL, NULL, NULL, &num_entries, &error),
                SMLA_ERROR_VALUE, "`num_chunks` must be given");
    EXPECT_FAIL(smla_split_context_chunks(&context, NULL, NULL, NULL, &count, NULL, &error),
                SMLA_ERROR_VALUE, "`num_entries` must be given");
    EXPECT_FAIL(smla_split_context_chunks(&context, &chunk, NULL, &len, &count, &num_entries,
                                          &error),
                SMLA_ERROR_VALUE, "`starts` must be given");
    EXPECT_FAIL(smla_split_context_chunks(&context, &chunk, &first, NULL, &count, &num_entries,
                                          &error),
                SMLA_ERROR_VALUE, "`lens` must be given");
    EXPECT_OK(smla_split_context_chunks(&context, NULL, NULL, NULL, &count, &num_entries, &error));
    EXPECT_EQ(count, 1);
    EXPECT_EQ(num_entries, 1);
    EXPECT_OK(
        smla_split_context_chunks(&context, &chunk, &first, &len, &count, &num_entries, &error));
    EXPECT_EQ(chunk.req_end, 1);
    EXPECT_EQ(chunk.num_tokens, 1);
    EXPECT_EQ(first, 0);
    EXPECT_EQ(len, 1);
    int32_t lens[2], begins[3], keys[2], pages[4];
    const smla_local_batches out = {lens, begins, keys, pages};
    smla_local_attention_args local = {.struct_size = sizeof local,
                                       .query_start_loc = (int32_t[]){0, 3},
                                       .seq_lens = (int32_t[]){6},
                                       .block_table = (int32_t[]){7, 8, 9},
                                       .num_reqs = 1,
                                       .table_width = 3,
                                       .attention_chunk = 4,
                                       .block_size = 2};
    EXPECT_FAIL(smla_local_attention_batches(NULL, &out, &count, &error), SMLA_ERROR_VALUE,
                "local_attention_batches: `struct_size` must");
    EXPECT_FAIL(smla_local_attention_batches(&local, &out, NULL, &error), SMLA_ERROR_VALUE,
                "`num_batches` must be given");
    EXPECT_FAIL(smla_local_attention_batches(&local,
                                             &(smla_local_batches){lens, begins, keys, NULL},
                                             &count, &error),
                SMLA_ERROR_VALUE, "`block_table` must be given");
    EXPECT_OK(smla_local_attention_batches(&local, NULL, &count, &error));
    EXPECT_EQ(count, 2);
    EXPECT_OK(smla_local_attention_batches(&local, &out, &count, &error));
    EXPECT_EQ(lens[0], 1);
    EXPECT_EQ(begins[2], 3);
    EXPECT_EQ(keys[1], 2);
    EXPECT_EQ(pages[2], 9);
    local.block_table = NULL;
    EXPECT_FAIL(smla_local_attention_batches(&local, &out, &count, &error), SMLA_ERROR_VALUE,
                "`block_table` must be given");
    local.seq_lens = NULL;
    EXPECT_FAIL(smla_local_attention_batches(&local, &out, &count, &error), SMLA_ERROR_VALUE,
                "`seq_lens` must be given");
    EXPECT_EQ(smla_builder_create(NULL, &builder, NULL), SMLA_ERROR_VALUE);
    EXPECT_EQ(smla_builder_build(NULL, NULL, NULL, NULL), SMLA_ERROR_VALUE);
    EXPECT_EQ(smla_forward(NULL, NULL), SMLA_ERROR_VALUE);
    EXPECT_EQ(smla_split_prefill_chunks(NULL, 1, 9, NULL, NULL, NULL), SMLA_ERROR_VALUE);
    EXPECT_EQ(smla_split_decodes_and_prefills(NULL, 1, 1, 1, 1, NULL, NULL), SMLA_ERROR_VALUE);
    EXPECT_EQ(smla_builder_workspace_bytes(NULL), 0);
    smla_v4_builder *v4_builder = NULL;
    const smla_v4_config v4_config = {.struct_size = sizeof v4_config};
    EXPECT_FAIL(smla_v4_builder_create(NULL, &v4_builder, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder: `struct_size` must");
    EXPECT_FAIL(smla_v4_builder_create(&v4_config, NULL, &error), SMLA_ERROR_VALUE,
                "`builder` must");
    EXPECT_FAIL(smla_v4_builder_build(NULL, NULL, NULL, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `builder` must");
    EXPECT_FAIL(smla_v4_attend(NULL, &error), SMLA_ERROR_VALUE, "attend: `struct_size` must");
    const smla_v4_attend_args attend = {.struct_size = sizeof attend};
    EXPECT_FAIL(smla_v4_attend(&attend, &error), SMLA_ERROR_VALUE,
                "attend: `builder` must have built a step, got none");
    EXPECT_EQ(smla_v4_builder_workspace_bytes(NULL), 0);
    smla_v4_builder_destroy(NULL);
    EXPECT(v4_builder == NULL);
    EXPECT(builder == NULL);
    EXPECT_EQ(smla_kernels(NULL, 0), smla_kernels(NULL, -5));
    EXPECT(smla_kernels(NULL, 0) >= 1);
    (void)split;
}

/* An error is filled on failure and left alone otherwise. */
static void
test_error(void)
{
    smla_error kept = {.status = SMLA_ERROR_BUFFER, .text = "as it was"};
    const any_args good = make_merge_attn_states();
    EXPECT_EQ(smla_merge_attn_states(&good.merge, &kept), SMLA_OK);
    EXPECT_EQ((int)kept.status, SMLA_ERROR_BUFFER);
    EXPECT(strcmp(kept.text, "as it was") == 0);
    static const char *const names[] = {
        "SMLA_OK",           "SMLA_ERROR_TYPE",    "SMLA_ERROR_VALUE",
        "SMLA_ERROR_BUFFER", "SMLA_ERROR_RUNTIME", "SMLA_ERROR_MEMORY"};
    for (int i = 0; i < 6; i++) {
        EXPECT(strcmp(smla_status_name((smla_status)i), names[i]) == 0);
    }
    EXPECT(smla_status_name((smla_status)77) != NULL);
    EXPECT_EQ(smla_version(),
              SMLA_VERSION_MAJOR * 10000 + SMLA_VERSION_MINOR * 100 + SMLA_VERSION_PATCH);
}

static void
test_kernels(void)
{
    enum { MOST = 64 };
    smla_kernel_info rows[MOST];
    memset(rows, 0xFF, sizeof rows);
    const int64_t count = smla_kernels(rows, MOST);
    EXPECT(count >= 1 && count <= MOST);
    int num_selected = 0;
    for (int64_t i = 0; i < count; i++) {
        EXPECT(strlen(rows[i].device) > 0 && strlen(rows[i].arch) > 0 && strlen(rows[i].name) > 0);
        EXPECT(!rows[i].selected || rows[i].available);
        num_selected += rows[i].selected;
    }
    EXPECT_EQ(num_selected, 1);
    smla_kernel_info one_row[2];
    memset(one_row, 0xFF, sizeof one_row);
    const smla_kernel_info before = one_row[1];
    EXPECT_EQ(smla_kernels(one_row, 1), count); /* no more rows than there is room for */
    EXPECT(memcmp(&one_row[1], &before, sizeof before) == 0);
}

int
main(void)
{
    RUN(test_struct_size);
    RUN(test_bad_struct_size);
    RUN(test_null);
    RUN(test_error);
    RUN(test_kernels);
    return report("test_args");
}
