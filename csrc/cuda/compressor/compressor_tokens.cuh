/* compressor_tokens.cuh: which tokens of a step close a group, and which save a state that no
 * closed group saves. compressor.cuh has the seven headings. */
#pragma once

#include "cuda/compressor/compressor_row.cuh"
#include "cuda/ptx/prefetch.cuh"

namespace {

/* ---- Tokens -------------------------------------------------------------------------------- */

__device__ __forceinline__ int64_t
request_of(const smla_compress_params &p, int64_t token)
{
    return __ldg(p.req_id_per_token + token * p.req_id_stride);
}

/* A token's entries in the arrays. */
struct token_facts {
    int64_t position;
    int64_t req;
    int64_t state_slot;
    int64_t row_slot;
};

/* Reads the entries; the four loads do not depend on each other. */
__device__ __forceinline__ token_facts
read_token(const smla_compress_params &p, int64_t token)
{
    return {position_of(p.states, token), request_of(p, token), read_slot(p.states.rows, token),
            read_slot(p.insert, token)};
}

__device__ __forceinline__ bool
is_slot(const smla_kv_view &kv, int64_t slot)
{
    return slot >= 0 && slot < kv.num_pages * kv.block_size;
}

/* The slot that the block table gives a position, which is not negative; -1 if there is none. */
__device__ __forceinline__ int64_t
find_slot(const compress_args &args, int64_t req, int64_t position)
{
    const smla_page_table &table = args.p.table;
    const int64_t block = smla_divide(position, args.state_block_size);
    if (block >= table.num_blocks) {
        return -1;
    }
    const int64_t page =
        __ldg(table.block_table + req * table.stride_req + block * table.stride_block);
    const bool is_page = page >= 0 && page < args.p.states.rows.kv.num_pages;
    return is_page ? page * table.block_size + (position - block * table.block_size) : -1;
}

/* Whether a token closes a group that has a row in the cache. */
__device__ __forceinline__ bool
closes_group(const compress_args &args, const token_facts &token)
{
    const smla_compress_params &p = args.p;
    return token.position >= 0 &&
           index_in_group(token.position, args.ratio) == args.ratio.divisor - 1 && token.req >= 0 &&
           token.req < p.num_reqs && is_slot(p.states.rows.kv, token.state_slot) &&
           is_slot(p.insert.kv, token.row_slot);
}

/* Whether `token` of this step is at `position` of request `req`, and saves its state to `slot`,
 * which is the block table's slot for that position. */
__device__ __forceinline__ bool
is_token_of(const smla_compress_params &p, int64_t token, int64_t req, int64_t position,
            int64_t slot)
{
    return token >= 0 && position_of(p.states, token) == position && request_of(p, token) == req &&
           read_slot(p.states.rows, token) == slot;
}

/* Whether the CTA that closes a token's group saves the token's state, which it does exactly if
 * find_state sets bit 0. The token has a slot, and its position is not negative. */
__device__ __forceinline__ bool
has_closer(const compress_args &args, int64_t token, const token_facts &facts)
{
    const smla_compress_params &p = args.p;
    const int64_t left = args.ratio.divisor - 1 - index_in_group(facts.position, args.ratio);
    if (token + left >= p.insert.num_tokens) {
        return false;
    }
    const token_facts closer = read_token(p, token + left);
    return closer.position == facts.position + left && closes_group(args, closer) &&
           closer.req == facts.req &&
           find_slot(args, closer.req, facts.position) == facts.state_slot;
}

/* The work for up to 32 tokens: bit i is for token first + i. */
struct token_marks {
    uint32_t closing; /* tokens that close a group */
    uint32_t lonely;  /* tokens that save a state, and whose group is not closed by this launch */
};

template <bool SAVES>
__device__ __forceinline__ token_marks
mark_tokens(const compress_args &args, int64_t first, int num_tokens)
{
    const int64_t token = first + lane_idx();
    bool is_closing = false;
    bool is_lonely = false;
    if (lane_idx() < num_tokens) {
        const token_facts facts = read_token(args.p, token);
        is_closing = closes_group(args, facts);
        is_lonely = SAVES && facts.position >= 0 &&
                    is_slot(args.p.states.rows.kv, facts.state_slot) &&
                    !has_closer(args, token, facts);
    }
    return {__ballot_sync(ALL_LANES, is_closing), __ballot_sync(ALL_LANES, is_lonely)};
}

/* The channels that a CTA has of all rows: all of them, or its part in a cluster. */
struct channel_range {
    int first;
    int count;
};

/* Brings the CTA's channels of kv and score of neighbouring tokens to L2. The warps divide the
 * rows, because the lanes of a warp start one after another. Addresses are rounded down to units of
 * 16 bytes, so the end of an unaligned row may be left out. */
__device__ __forceinline__ void
prefetch_tokens(const smla_partial_states_params &p, channel_range channels, int64_t first,
                int num_tokens)
{
    enum { UNIT = 16 };
    const int num_warps = (int)blockDim.x / SMLA_WARP_LANES;
    const int index = lane_idx() * num_warps + (int)threadIdx.x / SMLA_WARP_LANES;
    const int64_t size = p.rows.input_type == SMLA_FLOAT_BF16 ? 2 : 4;
    for (int i = index; i < 2 * num_tokens; i += (int)blockDim.x) {
        const int64_t token = first + i / 2;
        const uintptr_t row =
            i % 2 == 0 ? (uintptr_t)p.rows.kv_c + token * p.rows.kv_c_stride_token * size
                       : (uintptr_t)p.rows.k_pe + token * p.rows.k_pe_stride_token * size;
        const uintptr_t from = row + channels.first * size;
        ptx_bulk_prefetch_l2((const void *)(from / UNIT * UNIT), (uint32_t)(channels.count * size));
    }
}

/* Saves the CTA's channels of the marked tokens. The warps divide the pieces of all of them. */
template <bool ALIGNED>
__device__ __forceinline__ void
save_lonely(const compress_args &args, channel_range channels, int64_t first, uint32_t marks)
{
    const smla_partial_states_params &p = args.p.states;
    const int num_warps = (int)blockDim.x / SMLA_WARP_LANES;
    const int num_pieces = channels.count / PIECE;
    /* Index of the warp's piece, counted through all marked tokens. */
    int piece = (int)threadIdx.x / SMLA_WARP_LANES;
    for (; marks != 0; marks &= marks - 1) {
        const int64_t token = first + __ffs((int)marks) - 1;
        for (; piece < num_pieces; piece += num_warps) {
            const int64_t index = index_in_group(position_of(p, token), args.ratio);
            float *const row =
                (float *)row_of_slot(p.rows.kv, args.state_block_size, read_slot(p.rows, token))
                    .row;
            const int channel = channels.first + piece * PIECE + lane_idx() * CHANNELS;
            save_channels<ALIGNED>(p, token, index, row, channel);
        }
        piece -= num_pieces;
    }
}

} /* namespace */
