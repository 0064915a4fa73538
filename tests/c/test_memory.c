/* test_memory.c: the n-th allocation fails, for n = 1, 2, 3, ... until creating a builder succeeds.
 * Each time the error is SMLA_ERROR_MEMORY, the caller's pointer is left alone, and nothing is
 * leaked. Calls of operators have at most one allocation, and write nothing if it fails.
 *
 * The files that allocate are compiled into this program with its allocator. The linker then takes
 * none of their functions from the library.
 */
#include <stdlib.h>

static void *test_malloc(size_t size);
static void *test_calloc(size_t count, size_t size);
static void *test_aligned_alloc(size_t alignment, size_t size);
static void test_free(void *memory);

#define malloc        test_malloc
#define calloc        test_calloc
#define aligned_alloc test_aligned_alloc
#define free          test_free
#include "cpu/cache/slot_shares.c"      // NOLINT(bugprone-suspicious-include)
#include "cpu/cpu_backend.c"            // NOLINT(bugprone-suspicious-include)
#include "cpu/machine/thread_scratch.c" // NOLINT(bugprone-suspicious-include)
#include "step/engine.c"                // NOLINT(bugprone-suspicious-include)
#undef malloc
#undef calloc
#undef aligned_alloc
#undef free

#include "large_calls.h"

static int num_left = -1; /* allocations before one fails; negative: none fails */
static int num_live;

static bool
fails_now(void)
{
    if (num_left < 0) {
        return false;
    }
    num_left--;
    return num_left < 0;
}

static void *
count_live(void *memory)
{
    num_live += memory != NULL;
    return memory;
}

static void *
test_malloc(size_t size)
{
    return fails_now() ? NULL : count_live(malloc(size));
}

static void *
test_calloc(size_t count, size_t size)
{
    return fails_now() ? NULL : count_live(calloc(count, size));
}

static void *
test_aligned_alloc(size_t alignment, size_t size)
{
    return fails_now() ? NULL : count_live(aligned_alloc(alignment, size));
}

static void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

/* Fails each allocation of a creation once; returns how many there are. */
static int
fail_each(const smla_builder_config *config)
{
    for (int n = 0;; n++) {
        smla_builder *builder = NULL;
        num_left = n;
        const smla_status status = smla_builder_create(config, &builder, &error);
        const bool has_failed = num_left < 0;
        num_left = -1;
        if (!has_failed) {
            EXPECT_EQ(status, SMLA_OK);
            EXPECT(num_live > 0);
            smla_builder_destroy(builder);
            EXPECT_EQ(num_live, 0);
            return n;
        }
        EXPECT_EQ(status, SMLA_ERROR_MEMORY);
        EXPECT_EQ((int)error.status, SMLA_ERROR_MEMORY);
        EXPECT(strncmp(error.text, "MetadataBuilder: ", 17) == 0);
        EXPECT(builder == NULL);
        EXPECT_EQ(num_live, 0);
        num_left = n;
        EXPECT_EQ(smla_builder_create(config, &builder, NULL), SMLA_ERROR_MEMORY);
        num_left = -1;
        EXPECT_EQ(num_live, 0);
    }
}

static smla_builder_config
make_config(int64_t num_heads)
{
    return (smla_builder_config){.struct_size = sizeof(smla_builder_config),
                                 .num_heads = num_heads,
                                 .block_size = 64,
                                 .topk_tokens = 32,
                                 .max_num_seqs = 4,
                                 .max_num_batched_tokens = 16,
                                 .max_model_len = 128,
                                 .kv_format = SMLA_KV_FP8_DS_MLA,
                                 .device = cpu};
}

static void
test_create(void)
{
    const smla_builder_config mixed = make_config(16);
    const smla_builder_config separate = make_config(64);
    const int least = fail_each(&mixed);
    EXPECT(least >= 6);
    EXPECT_EQ(fail_each(&separate), least + 2); /* converted indices, the prefill workspace */
}

static void
test_own_workspace(void)
{
    smla_builder_config config = make_config(64);
    const array *workspace = ARRAY(bf16, 200, 576);
    config.workspace = &workspace->tensor;
    const smla_builder_config mixed = make_config(16);
    EXPECT_EQ(fail_each(&config), fail_each(&mixed) + 1); /* converted indices */
    EXPECT(is_poison(workspace));
}

/* A config that is refused after the builder itself was allocated. */
static void
test_refused(void)
{
    smla_builder *builder = NULL;
    smla_builder_config config = make_config(16);
    config.device.device_type = kDLMetal;
    EXPECT_FAIL(smla_builder_create(&config, &builder, &error), SMLA_ERROR_RUNTIME, "device type");
    EXPECT_EQ(num_live, 0);
}

/* Building and running a step allocates nothing. */
static void
test_build_allocates_nothing(void)
{
    smla_builder *builder = NULL;
    const smla_builder_config config = make_config(64);
    EXPECT_OK(smla_builder_create(&config, &builder, &error));
    if (builder == NULL) {
        return;
    }
    const int32_t starts[] = {0, 1, 9};
    const int32_t seq_lens[] = {100, 9};
    const array *table = ARRAY(int32, 2, 2);
    const smla_build_args args = {.struct_size = sizeof args,
                                  .query_start_loc_cpu = starts,
                                  .seq_lens_cpu = seq_lens,
                                  .block_table = &table->tensor,
                                  .num_reqs = 2,
                                  .num_actual_tokens = 9};
    num_left = 0;
    EXPECT_OK(smla_builder_build(builder, &args, NULL, &error));
    EXPECT_EQ(num_left, 0);
    num_left = -1;
    smla_builder_destroy(builder);
    EXPECT_EQ(num_live, 0);
}

/* The builder of a paged step, whose builds send nothing, and allocate nothing either. */
static void
test_paged_builder(void)
{
    const smla_paged_config config = {.struct_size = sizeof config,
                                      .max_bs = 2,
                                      .max_num_tokens = 4,
                                      .max_context_len = 8,
                                      .device = cpu};
    const array *const lens = ARRAY(int32, 1), *const slots = ARRAY(int32, 1, 8);
    SET(lens, 0, 0);
    const smla_paged_build_args args = {.struct_size = sizeof args,
                                        .seq_lens = &lens->tensor,
                                        .req_pool_indices = &lens->tensor,
                                        .req_to_token = &slots->tensor,
                                        .num_reqs = 1,
                                        .mode = SMLA_MODE_DECODE};
    smla_paged_builder *builder = NULL;
    int n = 0;
    for (bool has_failed = true; has_failed; n++) {
        num_left = n;
        const smla_status status = smla_paged_builder_create(&config, &builder, &error);
        has_failed = num_left < 0;
        num_left = -1;
        EXPECT_EQ(status, has_failed ? SMLA_ERROR_MEMORY : SMLA_OK);
        EXPECT((builder == NULL) == has_failed);
        EXPECT(!has_failed || num_live == 0);
    }
    EXPECT(n > 5);
    num_left = 0;
    EXPECT_OK(smla_paged_builder_build(builder, &args, NULL, &error));
    EXPECT_EQ(num_left, 0);
    num_left = -1;
    smla_paged_builder_destroy(builder);
    EXPECT_EQ(num_live, 0);
}

/* A call without memory, then one with it. Returns how many allocations it has. */
static int
fail_call(const char *name, smla_status (*call)(const any_args *, smla_error *),
          any_args (*make)(void))
{
    const any_args args = make();
    num_left = 1;
    EXPECT_OK(call(&args, &error));
    const int count = 1 - num_left;
    EXPECT(count == 0 || count == 1);
    EXPECT_EQ(num_live, 0);
    if (count == 1) {
        num_left = 0;
        EXPECT_FAIL(call(&args, &error), SMLA_ERROR_MEMORY, "of scratch must fit in memory");
        EXPECT(strncmp(error.text, name, strlen(name)) == 0 && error.text[strlen(name)] == ':');
        EXPECT_EQ(num_live, 0);
    }
    num_left = -1;
    EXPECT_OK(call(&args, &error));
    EXPECT_EQ(num_live, 0);
    return count;
}

static void
test_operators(void)
{
    int num_allocations = 0;
    for (int i = 0; i < NUM_OPERATORS; i++) {
        num_allocations += fail_call(title_of(&operators[i]), operators[i].call, operators[i].make);
    }
    EXPECT(num_allocations >= 4); /* three projections and compress_norm_rope_store */
    for (int i = 0; i < NUM_LARGE_CALLS; i++) {
        const large_call *const large = &large_calls[i];
        EXPECT_EQ(fail_call(large->name, large->call, large->make), large->num_allocations);
    }
}

/* A long write looks at its slots with a table, and does without one. */
static void
test_long_write(void)
{
    enum { TOKENS = 16 * LONG_WRITE_ROWS };
    array *const slots = ARRAY(int64, TOKENS);
    array *const caches[2] = {ARRAY(uint8, TOKENS, 132), ARRAY(uint8, TOKENS, 132)};
    for (int64_t i = 0; i < TOKENS; i++) {
        SET(slots, (double)(TOKENS - 1 - i), i);
    }
    smla_indexer_k_cache_args args = {.struct_size = sizeof args,
                                      .k = normal(ARRAY(bf16, TOKENS, 128)),
                                      .slot_mapping = &slots->tensor,
                                      .kv_format = SMLA_KV_FP8_INDEX};
    for (int i = 0; i < 2; i++) {
        const int64_t shape[] = {1, TOKENS, 132};
        smla_view pages;
        smla_make_view(&pages, caches[i]->tensor.data, caches[i]->tensor.dtype, cpu, 3, shape);
        args.k_cache = &pages.tensor;
        num_left = i == 0 ? -1 : 0;
        EXPECT_OK(smla_indexer_k_quant_and_cache(&args, &error));
        EXPECT_EQ(num_live, 0);
    }
    num_left = -1;
    EXPECT_EQ(memcmp(caches[0]->tensor.data, caches[1]->tensor.data, caches[0]->bytes), 0);
}

int
main(void)
{
    RUN(test_operators);
    RUN(test_long_write);
    RUN(test_create);
    RUN(test_own_workspace);
    RUN(test_refused);
    RUN(test_build_allocates_nothing);
    RUN(test_paged_builder);
    return report("test_memory");
}
