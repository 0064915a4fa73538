/* paged_lists.c: the arrays of a paged step: lengths, running sums, tables of pages and of slots.
 *
 * Lengths, sums and the rows of trees go from request to request. Tables of pages, which are most
 * of the work, are written by threads that each have some of the requests.
 */
#include <string.h>

#include "core/params_paged_step.h"
#include "cpu/cpu.h"
#include "cpu/machine/threads.h"

enum { MIN_PARALLEL_PAGES = 1 << 15 }; /* below, starting threads costs more than they save */

/* A slot's place in the window pool; -1: none. */
static int32_t
map_slot(const smla_paged_step_params *p, int32_t slot)
{
    return slot < 0 || slot >= p->num_mapped ? -1 : p->mapping[slot * p->mapping_stride];
}

/* The slot of position `at` of a pool row, in the window pool if `is_mapped`; -1: none. */
static int32_t
find_slot(const smla_paged_step_params *p, int64_t pool_row, int64_t at, bool is_mapped)
{
    if (at >= p->pool_width) {
        return -1;
    }
    const int32_t slot = p->req_to_token[pool_row * p->pool_stride + at];
    return is_mapped ? map_slot(p, slot) : slot;
}

/* The page of a slot, rounded down. */
static int32_t
page_of(int32_t slot, int32_t page_size)
{
    return slot >= 0 ? slot / page_size : ~(~slot / page_size);
}

/* ---- Tables of pages ----------------------------------------------------------------------- */

enum { PREFETCHED_PAGES = 64 }; /* a slot of each page is in a cache line of its own */

/* The pages of `count` slots, which are `page_size` entries apart. */
static void
write_pages(int32_t *out, const int32_t *slots, int64_t count, int64_t page_size)
{
    if (page_size == 1) {
        memcpy(out, slots, (size_t)count * sizeof *out);
    } else if ((page_size & (page_size - 1)) == 0) {
        const int shift = __builtin_ctzll((uint64_t)page_size);
        const uintptr_t ahead =
            (uintptr_t)slots + (uintptr_t)(PREFETCHED_PAGES * page_size) * sizeof *slots;
        for (int64_t i = 0; i < count; i++) {
            __builtin_prefetch((const void *)(ahead + (uintptr_t)(i * page_size) * sizeof *slots));
            out[i] = slots[i * page_size] >> shift; /* rounds down */
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            out[i] = page_of(slots[i * page_size], (int32_t)page_size);
        }
    }
}

static void
write_mapped_pages(const smla_paged_step_params *p, int32_t *out, const int32_t *slots,
                   int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        out[i] = page_of(map_slot(p, slots[i * p->page_size]), (int32_t)p->page_size);
    }
}

/* The slots of a request from page `first` on. */
static const int32_t *
slots_from(const smla_paged_step_params *p, const smla_paged_request *r, int64_t first)
{
    return p->req_to_token + r->pool_row * p->pool_stride + first * p->page_size;
}

/* Writes a request's rows of the tables. Padding has a page 0, because a kernel may read one. */
static void
write_tables(const smla_paged_step_params *p, int64_t req)
{
    const smla_paged_request r = smla_read_paged_request(p, req);
    const int64_t row = req * p->table_stride;
    if (p->table_stride == 0) {
        return;
    }
    if (r.seq_len == 0) {
        int32_t *const tables[] = {p->page_table, p->swa_page_table, p->encoder_table};
        for (int i = 0; i < 3; i++) {
            if (tables[i] != NULL) {
                tables[i][row] = 0;
            }
        }
        return;
    }
    const int64_t keys = smla_paged_cache_len(p, &r, p->num_steps - 1);
    const int64_t count = smla_paged_num_pages(p, keys);
    const int64_t first = smla_paged_first_page(p, &r);
    write_pages(p->page_table + row, slots_from(p, &r, first), count, p->page_size);
    if (p->swa_page_table != NULL) {
        write_mapped_pages(p, p->swa_page_table + row, slots_from(p, &r, first), count);
    }
    if (p->encoder_table != NULL) {
        write_pages(p->encoder_table + row, slots_from(p, &r, 0), smla_paged_encoder_columns(p, &r),
                    p->page_size);
    }
}

/* ---- Rows of a tree ------------------------------------------------------------------------ */

/* Writes the slots of a row of `expand` from the mask: those that it sees in their order, then the
 * others. Returns how many it sees. */
static int64_t
sort_draft_slots(const smla_paged_step_params *p, const smla_paged_request *r, int64_t mask_start,
                 int32_t *out)
{
    int64_t num_seen = 0;
    for (int seen = 1; seen >= 0; seen--) {
        for (int64_t i = 0; i < p->rows_per_req; i++) {
            const int64_t at = mask_start + r->seq_len + i;
            const bool is_seen = at < p->mask_entries && p->mask[at * p->mask_stride] != 0;
            if (is_seen == seen) {
                *out++ = find_slot(p, r->pool_row, r->seq_len + i, false);
                num_seen += seen;
            }
        }
    }
    return num_seen;
}

/* Writes a row of `expand`, and returns the slots that step 0 sees. */
static int64_t
write_expand_row(const smla_paged_step_params *p, const smla_paged_request *r, int64_t row,
                 int64_t mask_start, int32_t *out)
{
    if (p->mask != NULL) {
        return sort_draft_slots(p, r, mask_start, out);
    }
    for (int64_t i = 0; i < p->tree_slots + p->num_steps - 1; i++) {
        out[i] = (int32_t)smla_int_at(&p->cache_loc, row * p->row_loc + i);
    }
    return p->tree_slots;
}

/* Writes a row of `swa`: the end of the prefix, then the slots of the row of `expand`. */
static void
write_window_row(const smla_paged_step_params *p, const smla_paged_request *r,
                 const int32_t *expand, int64_t count, int32_t *out)
{
    const int64_t len = smla_paged_window_len(p, r);
    for (int64_t i = 0; i < len; i++) {
        out[i] = find_slot(p, r->pool_row, r->seq_len - len + i, p->mapping != NULL);
    }
    for (int64_t i = 0; i < count; i++) {
        out[len + i] = p->mapping != NULL ? map_slot(p, expand[i]) : expand[i];
    }
}

/* Writes the lengths and the sums of a row in every step. */
static void
add_row(const smla_paged_step_params *p, const smla_paged_tree_rows *rows, int64_t row, int64_t len)
{
    for (int64_t step = 0; step < p->num_steps; step++) {
        int32_t *const starts = rows->starts + step * rows->starts_stride_step;
        const int32_t seen = (int32_t)(len < 0 ? 0 : len + step);
        rows->seqlens[step * rows->seqlens_stride_step + row] = seen;
        starts[row + 1] = starts[row] + seen;
    }
}

static void
begin_rows(const smla_paged_step_params *p, const smla_paged_tree_rows *rows)
{
    for (int64_t step = 0; rows->seqlens != NULL && step < p->num_steps; step++) {
        rows->starts[step * rows->starts_stride_step] = 0;
    }
}

static void
write_tree(const smla_paged_step_params *p)
{
    int64_t mask_start = 0;
    begin_rows(p, &p->expand);
    begin_rows(p, &p->swa);
    for (int64_t req = 0; req < p->num_reqs; req++) {
        const smla_paged_request r = smla_read_paged_request(p, req);
        for (int64_t i = 0; i < p->rows_per_req; i++) {
            const int64_t row = req * p->rows_per_req + i;
            int32_t *const slots = p->expand.slots + row * p->expand.slots_stride;
            int64_t len = -1, window_len = -1; /* padding, whose rows see nothing in any step */
            if (r.seq_len > 0) {
                len = write_expand_row(p, &r, row, mask_start + i * r.mask_row, slots);
                window_len = len + smla_paged_window_len(p, &r);
            }
            add_row(p, &p->expand, row, len);
            if (p->swa.seqlens != NULL) {
                add_row(p, &p->swa, row, window_len);
                write_window_row(p, &r, slots, len < 0 ? 0 : len + p->num_steps - 1,
                                 p->swa.slots + row * p->swa.slots_stride);
            }
        }
        mask_start += p->rows_per_req * r.mask_row;
    }
}

/* ---- Lengths ------------------------------------------------------------------------------- */

/* Writes the keys of virtual request `number` in a step. */
static void
write_virtual_keys(const smla_paged_step_params *p, const smla_paged_request *r,
                   const smla_paged_virtual *v, int64_t step, int64_t number)
{
    const int64_t columns = p->chunk / p->page_size;
    const int64_t at = step * p->num_local + number;
    p->local_seqlens[at] = (int32_t)v->seq_len;
    for (int64_t i = 0; i < columns; i++) {
        const int64_t column =
            smla_least_of(smla_divide_len(v->start, p->page_size) + i, p->table_columns - 1);
        const int64_t position = (smla_paged_first_page(p, r) + column) * p->page_size;
        p->local_table[at * columns + i] =
            v->seq_len == 0 ? 0
                            : page_of(find_slot(p, r->pool_row, position, p->mapping != NULL),
                                      (int32_t)p->page_size);
    }
}

/* Makes a request's virtual requests from number `made` on, and returns the next number. A step of
 * a draft has one for each request. */
static int64_t
write_virtual(const smla_paged_step_params *p, const smla_paged_request *r, int64_t made)
{
    const int64_t count = smla_count_virtual(p, r->query_len, smla_paged_cache_len(p, r, 0));
    for (int64_t i = 0; i < count && made < p->num_local; i++, made++) {
        for (int64_t step = 0; step < p->num_steps; step++) {
            const smla_paged_virtual v =
                smla_virtual_at(p, r->query_len, smla_paged_cache_len(p, r, step), i);
            p->local_starts[made + 1] = p->local_starts[made] + (int32_t)v.query_len;
            write_virtual_keys(p, r, &v, step, made);
        }
    }
    return made;
}

static void
write_lengths(const smla_paged_step_params *p)
{
    int64_t num_queries = 0, num_encoded = 0, num_made = 0;
    p->cu_seqlens_q[0] = 0;
    if (p->encoder_seqlens != NULL) {
        p->encoder_starts[0] = 0;
    }
    if (p->num_local > 0) {
        p->local_starts[0] = 0;
    }
    for (int64_t step = 0; step < p->num_steps; step++) {
        p->cu_seqlens_k[step * p->starts_stride_step] = 0;
    }
    for (int64_t req = 0; req < p->num_reqs; req++) {
        const smla_paged_request r = smla_read_paged_request(p, req);
        num_queries = smla_least_of(num_queries + r.query_len, p->max_tokens);
        p->cu_seqlens_q[req + 1] = (int32_t)num_queries;
        for (int64_t step = 0; step < p->num_steps; step++) {
            int32_t *const starts = p->cu_seqlens_k + step * p->starts_stride_step;
            const int32_t len = (int32_t)smla_paged_cache_len(p, &r, step);
            p->cache_seqlens[step * p->seqlens_stride_step + req] = len;
            starts[req + 1] = starts[req] + len;
        }
        if (p->leftpad != NULL) {
            p->leftpad[req] = (int32_t)(p->prefix_len + smla_paged_leftpad(p, &r));
        }
        if (p->rest_seqlens != NULL) {
            p->rest_seqlens[req] = p->cache_seqlens[req] - (int32_t)smla_paged_whole_prefix(p);
        }
        if (p->encoder_seqlens != NULL) {
            num_encoded += r.encoder_len;
            p->encoder_seqlens[req] = (int32_t)r.encoder_len;
            p->encoder_starts[req + 1] = (int32_t)num_encoded;
        }
        num_made = p->num_local > 0 ? write_virtual(p, &r, num_made) : 0;
    }
    for (; num_made < p->num_local; num_made++) {
        p->local_starts[num_made + 1] = p->local_starts[num_made];
        for (int64_t step = 0; step < p->num_steps; step++) {
            p->local_seqlens[step * p->num_local + num_made] = 0;
        }
    }
    if (p->prefix != NULL) {
        const int32_t len = (int32_t)p->prefix_len;
        const int32_t prefix[SMLA_PREFIX_SIZE] = {len, (int32_t)smla_paged_whole_prefix(p),
                                                  0,   len,
                                                  0,   (int32_t)num_queries};
        memcpy(p->prefix, prefix, sizeof prefix);
    }
}

/* Maps the slots of this step's tokens. Those of padding are -1, so that nothing is written. */
static void
map_cache_loc(const smla_paged_step_params *p)
{
    for (int64_t i = 0; i < p->num_cache_loc; i++) {
        const bool is_padding = smla_is_padding_loc(p, i, p->cu_seqlens_q[p->num_reqs]);
        const int64_t slot = is_padding ? -1 : smla_int_at(&p->cache_loc, i);
        p->swa_cache_loc[i] = slot < 0           ? (int32_t)slot
                              : slot > INT32_MAX ? -1
                                                 : map_slot(p, (int32_t)slot);
    }
}

smla_status
smla_cpu_fill_paged_lists(const smla_paged_step_params *p, smla_error *error)
{
    (void)error;
    write_lengths(p);
#pragma omp parallel for schedule(static) if (p->num_reqs * p->table_columns >= MIN_PARALLEL_PAGES)
    for (int64_t req = 0; req < p->num_reqs; req++) {
        write_tables(p, req);
    }
    if (p->rows_per_req > 0) {
        write_tree(p);
    }
    for (int64_t i = 0; i <= p->num_tokens; i++) {
        p->token_ids[i] = (int32_t)i;
    }
    if (p->swa_cache_loc != NULL) {
        map_cache_loc(p);
    }
    return SMLA_OK;
}
