/* requests.cuh: which request has a tile. Only the device knows how long requests are, so a warp
 * counts the tiles of 32 requests at a time until it has found the one that it looks for. The
 * portable kernel of multi-head attention has a search of its own (varlen_tiles.cuh), because it
 * spills with this one.
 */
#pragma once

#include "cuda/ptx/launch.cuh"

/* Where a warp's search stands. Tiles that are searched for one after the other have growing
 * numbers, so the next search goes on from here. */
template <typename T> struct request_search {
    int32_t req; /* the first of the 32 requests looked at */
    T before;    /* tiles of the requests in front of it */
};

/* What a search finds: the tile's request, and the lane that counted its tiles. */
template <typename T> struct tile_request {
    int32_t req;
    int lane;
    T first_tile; /* number of the request's first tile */
};

/* Finds the request with tile `number`, or returns false where there are fewer tiles. A warp calls
 * it; count_tiles(req) is called for requests below num_reqs. */
template <typename T, typename CountTiles>
static __device__ __forceinline__ bool
find_request_of_tile(T number, int32_t num_reqs, int lane, CountTiles count_tiles,
                     request_search<T> *search, tile_request<T> *found)
{
#pragma unroll 1
    for (; search->req < num_reqs; search->req += SMLA_WARP_LANES) {
        const int32_t own = search->req + lane;
        const T count = own < num_reqs ? count_tiles(own) : 0;
        const T past = search->before + smla_scan_lanes(count, lane);
        const uint32_t are_behind = __ballot_sync(0xFFFFFFFFu, past > number);
        if (are_behind != 0) {
            found->lane = __ffs((int)are_behind) - 1;
            found->req = search->req + found->lane;
            found->first_tile = __shfl_sync(0xFFFFFFFFu, past - count, found->lane);
            return true;
        }
        search->before = __shfl_sync(0xFFFFFFFFu, past, SMLA_WARP_LANES - 1);
    }
    return false;
}
