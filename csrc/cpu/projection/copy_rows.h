/* copy_rows.h: copies short rows between arrays, for quantisers, which take long ones. */
#pragma once

#include <stdint.h>
#include <string.h>

/* The last copy of a row may overlap the one before it, so that rows need no loop over bytes. */
static inline __attribute__((always_inline)) void
copy_rows_by(const int64_t unit, const uint8_t *from, int64_t from_stride, uint8_t *to,
             int64_t to_stride, int64_t row_bytes, int64_t num_rows)
{
#pragma GCC unroll 8
    for (int64_t i = 0; i < num_rows; i++) {
        for (int64_t at = 0; at < row_bytes - unit; at += unit) {
            memcpy(to + i * to_stride + at, from + i * from_stride + at, (size_t)unit);
        }
        memcpy(to + i * to_stride + row_bytes - unit, from + i * from_stride + row_bytes - unit,
               (size_t)unit);
    }
}

/* Strides are in bytes. The arrays must not overlap. */
static inline void
copy_rows(const void *from, int64_t from_stride, void *to, int64_t to_stride, int64_t row_bytes,
          int64_t num_rows)
{
    if (row_bytes >= 16) {
        copy_rows_by(16, from, from_stride, to, to_stride, row_bytes, num_rows);
    } else if (row_bytes >= 8) {
        copy_rows_by(8, from, from_stride, to, to_stride, row_bytes, num_rows);
    } else if (row_bytes > 4) {
        copy_rows_by(4, from, from_stride, to, to_stride, row_bytes, num_rows);
    } else if (row_bytes == 4) { /* constant sizes need no loop */
        copy_rows_by(4, from, from_stride, to, to_stride, 4, num_rows);
    } else if (row_bytes == 3) {
        copy_rows_by(2, from, from_stride, to, to_stride, 3, num_rows);
    } else if (row_bytes == 2) {
        copy_rows_by(2, from, from_stride, to, to_stride, 2, num_rows);
    } else {
        copy_rows_by(1, from, from_stride, to, to_stride, 1, num_rows);
    }
}
