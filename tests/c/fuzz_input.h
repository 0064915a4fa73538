/* fuzz_input.h: what the fuzzers share: numbers of an input's bytes, and what they require.
 */
#pragma once

#include "testing.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- Bytes --------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *data;
    size_t size;
} reader;

static inline uint8_t
read_byte(reader *r)
{
    if (r->size == 0) {
        return 0;
    }
    r->size--;
    return *r->data++;
}

static inline uint64_t
read_bits(reader *r)
{
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        bits = bits << 8 | read_byte(r);
    }
    return bits;
}

static inline double
read_double(reader *r)
{
    double x = 0.0;
    memcpy(&x, &(uint64_t){read_bits(r)}, sizeof x);
    return x;
}

/* A number at the edge of what sizes, strides and counts can be, or any number. */
static inline int64_t
read_number(reader *r)
{
    static const int64_t edges[] = {
        -1,
        0,
        1,
        2,
        3,
        5,
        64,
        127,
        128,
        129,
        512,
        575,
        576,
        577,
        656,
        672,
        -576,
        -656,
        INT32_MAX,
        INT32_MIN,
        INT64_MAX,
        INT64_MIN,
        1LL << 31,
        1LL << 32,
        1LL << 52,
        1LL << 61,
        1LL << 62,
        -(1LL << 62),
        -2,
        INT64_MAX - 1,
        16,
        INT64_MAX / 2,
        INT64_MAX / 656,
        INT64_MAX / 1152,
        8,
    };
    const uint8_t kind = read_byte(r);
    if (kind < sizeof edges / sizeof edges[0]) {
        return edges[kind];
    }
    return kind < 200 ? (int64_t)(int8_t)read_byte(r) : (int64_t)read_bits(r);
}

/* Usually a number below `most`, which a checker accepts as a size. */
static inline int64_t
read_count(reader *r, int64_t most)
{
    const uint8_t kind = read_byte(r);
    return kind < 240 ? kind % most : read_number(r);
}

static inline void
require(bool good, const char *what, const char *text)
{
    if (!good) {
        fprintf(stderr, "fuzzer: %s: \"%.*s\"\n", what, (int)sizeof error.text, text);
        abort();
    }
}

static inline void
require_sound(const char *op, smla_status status, const smla_error *e)
{
    require(status >= SMLA_OK && status <= SMLA_ERROR_MEMORY, "status outside the enum", op);
    if (status == SMLA_OK) {
        return;
    }
    require(e->status == status, "another status in the error", op);
    require(memchr(e->text, '\0', sizeof e->text) != NULL, "text without an end", op);
    require(strncmp(e->text, op, strlen(op)) == 0, "text of another operator", e->text);
    require(strstr(e->text, " must ") != NULL, "text without a rule", e->text);
    require(strstr(e->text, "got ") != NULL, "text without what it got", e->text);
}

enum { MAX_REQS = 12 };

/* Fills `starts` with numbers that usually grow, as query_start_loc does. */
static inline void
read_starts(reader *r, int32_t *starts, int64_t count)
{
    starts[0] = read_byte(r) > 250 ? (int32_t)read_number(r) : 0;
    for (int64_t i = 1; i <= count; i++) {
        const uint8_t step = read_byte(r);
        starts[i] =
            step < 250 ? (int32_t)((uint32_t)starts[i - 1] + step % 6u) : (int32_t)read_number(r);
    }
}

/* The builder really allocates, so its counts are small, or so large that they are refused. */
static inline int64_t
read_config_count(reader *r, int64_t most)
{
    const uint8_t kind = read_byte(r);
    const int64_t count = kind < 240 ? kind % most + 1 : read_number(r);
    return count > most && count <= INT32_MAX ? most : count;
}
