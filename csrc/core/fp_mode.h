/* fp_mode.h: the floating-point mode of a thread: how it rounds, and what becomes of subnormal
 * numbers. A result must not depend on the caller's mode, so every public entry point sets the mode
 * that the work needs, and gives the caller's back when it returns. Threads of pool.c take over the
 * mode of the thread that runs the loop.
 *
 * A mode is the value of the register that holds it, exception flags included. Calls of functions
 * in other files must lie between a change of mode and the arithmetic that it is for, because
 * compilers move arithmetic over a change that they see.
 */
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef uint32_t smla_fp_mode; /* MXCSR */

/* Round to the nearest, keep subnormal numbers, mask all exceptions: a process starts so. */
#define SMLA_FP_EXACT ((smla_fp_mode)0x1F80)

/* The same, but subnormal operands and results are zero. The kernels whose results are bounded, not
 * exact to the byte, use it, because a subnormal number costs some processors 150 cycles. */
#define SMLA_FP_FLUSH ((smla_fp_mode)0x9FC0)

static inline smla_fp_mode
smla_fp_read(void)
{
    return _mm_getcsr();
}

static inline void
smla_fp_set(smla_fp_mode mode)
{
    _mm_setcsr(mode);
}

#elif defined(__aarch64__)

typedef uint64_t smla_fp_mode; /* FPCR */

#define SMLA_FP_EXACT ((smla_fp_mode)0)
#define SMLA_FP_FLUSH ((smla_fp_mode)1 << 24)

static inline smla_fp_mode
smla_fp_read(void)
{
    smla_fp_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
}

static inline void
smla_fp_set(smla_fp_mode mode)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory");
}

#else
#include <fenv.h>

/* Only the rounding mode is known to the C standard. */
typedef int smla_fp_mode;

#define SMLA_FP_EXACT FE_TONEAREST
#define SMLA_FP_FLUSH FE_TONEAREST

static inline smla_fp_mode
smla_fp_read(void)
{
    return fegetround();
}

static inline void
smla_fp_set(smla_fp_mode mode)
{
    fesetround(mode);
}
#endif

/* Changes the mode of the thread, and returns the mode that it had. Most threads are in the wanted
 * mode already, and reading the register costs less than writing it. */
static inline smla_fp_mode
smla_fp_change(smla_fp_mode wanted)
{
    const smla_fp_mode before = smla_fp_read();
    if (before != wanted) {
        smla_fp_set(wanted);
    }
    return before;
}
