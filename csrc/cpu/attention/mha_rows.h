/* mha_rows.h: which rows a tile of multi-head attention has, where its keys lie, and which rows
 * have a lane. mha_kernel.c includes it.
 */
#pragma once

#include <assert.h>

/* The keys that a query of a request sees in the tile. */
static smla_key_range
find_keys(const tile_work *work, const smla_kv_request *of, int64_t query)
{
    const smla_key_range seen = smla_find_mha_range(work->params, of, query);
    const smla_key_range in = work->tile->keys;
    const int64_t begin = smla_clamp_int64(seen.begin, in.begin, in.end);
    return (smla_key_range){begin, smla_clamp_int64(seen.end, begin, in.end)};
}

/* Finds up to `count` rows of a request, from its row `first` on. Its keys begin at `first_key` of
 * the tile. Returns how many there were. */
static int
add_rows(const tile_work *work, int64_t req, const smla_kv_request *of, int64_t first, int count,
         int64_t first_key, smla_mha_row *rows)
{
    const smla_results *const results = &work->params->results;
    const smla_mha_tile *const tile = work->tile;
    const int64_t group = smla_mha_group(work->params);
    int64_t head = first % group;
    int added = 0;
    for (int64_t query = first / group; query < of->num_queries; query++, head = 0) {
        const smla_key_range keys = find_keys(work, of, query);
        const int64_t token = of->first_query + query - tile->first_token;
        for (; head < group; head++) {
            const int64_t result_head = tile->kv_head * group + head - tile->first_head;
            if (added == count) {
                return added;
            }
            rows[added++] = (smla_mha_row){
                .token = of->first_query + query,
                .head = tile->kv_head * group + head,
                .out_at =
                    token * results->out_stride_token + result_head * results->out_stride_head,
                .lse_at =
                    token * results->lse_stride_token + result_head * results->lse_stride_head,
                .req = req,
                .first_key = of->first_key - first_key,
                .keys = {first_key + keys.begin, first_key + keys.end},
            };
        }
    }
    return added;
}

/* The keys that any of `count` rows sees. */
static smla_key_range
find_seen_keys(const smla_mha_row *rows, int count)
{
    smla_key_range all = {INT64_MAX, 0};
    for (int i = 0; i < count; i++) {
        const smla_key_range keys = rows[i].keys;
        if (keys.begin < keys.end) {
            all.begin = keys.begin < all.begin ? keys.begin : all.begin;
            all.end = keys.end > all.end ? keys.end : all.end;
        }
    }
    return all;
}

/* Finds the rows, and where the first keys lie. Those that no row sees may be in pages that nobody
 * may read. */
static void
find_rows(tile_work *work)
{
    const smla_mha_tile *const tile = work->tile;
    const smla_kv_place nowhere = {-1, 0};
    int64_t end = 0;
    int found = 0;
    for (int64_t req = tile->req; found < tile->num_rows; req++) {
        const smla_kv_request of = smla_find_request(work->params, req);
        if (of.num_queries == 0) {
            continue;
        }
        const int64_t first_key = smla_place_mha_keys(end, of.num_keys);
        smla_mha_row *const rows = work->rows + found;
        const int count =
            add_rows(work, req, &of, tile->row, tile->num_rows - found, first_key, rows);
        const smla_key_range seen = find_seen_keys(rows, count);
        int64_t key = end;
        assert(end >= 0);
        found += count;
        end = first_key + of.num_keys;
        work->req = req;
        work->first_key = of.first_key - first_key;
        for (; key < end && key < SMLA_MHA_SHARED_KEYS; key++) {
            work->shared_keys[key] =
                key >= seen.begin && key < seen.end
                    ? smla_find_kv_place(work->params, req, work->first_key + key)
                    : nowhere;
        }
    }
}

/* Decides which rows have a lane. Those with one key need none: in a small tile, others then fill
 * fewer vectors. Large tiles stay as they are, because their vectors begin where blocks of keys do.
 * Returns how many rows see one key. */
static int
choose_lanes(tile_work *work)
{
    smla_mha_row alone[2 * WIDTH];
    const int num_rows = work->tile->num_rows;
    int num_alone = 0;
    for (int i = 0; i < num_rows; i++) {
        num_alone += smla_is_one_key(work->rows[i].keys);
    }
    work->num_rows = num_alone == num_rows ? 0 : num_rows;
    if (work->num_rows == 0 || num_alone == 0 || num_rows > 2 * WIDTH) {
        return num_alone;
    }
    work->num_rows = 0;
    for (int i = 0, found = 0; i < num_rows; i++) {
        const smla_mha_row row = work->rows[i];
        if (smla_is_one_key(row.keys)) {
            alone[found++] = row;
        } else {
            work->rows[work->num_rows++] = row;
        }
    }
    memcpy(work->rows + work->num_rows, alone, (size_t)num_alone * sizeof *alone);
    return num_alone;
}
