/* interrupt.c: the interrupt of each thread, and when its binding is asked. */
#include "core/interrupt.h"

#include "core/clock.h"

enum { ASK_EVERY_NS = 50 * 1000 * 1000 };

static _Thread_local smla_interrupt *current;

smla_interrupt *
smla_set_interrupt(smla_interrupt *interrupt)
{
    smla_interrupt *const former = current;
    current = interrupt;
    return former;
}

smla_interrupt *
smla_find_interrupt(void)
{
    return current;
}

void
smla_ask(smla_interrupt *interrupt)
{
    const int64_t now = smla_clock_ns();
    if (interrupt->ask_at_ns == 0) {
        interrupt->ask_at_ns = now + ASK_EVERY_NS;
    } else if (now >= interrupt->ask_at_ns && !atomic_load(&interrupt->is_ended)) {
        if (interrupt->wants_end(interrupt->context)) {
            atomic_store(&interrupt->is_ended, true);
        }
        interrupt->ask_at_ns = smla_clock_ns() + ASK_EVERY_NS;
    }
}

smla_status
smla_check_ended(const char *op, smla_interrupt *interrupt, smla_error *error)
{
    return interrupt == NULL || !atomic_load(&interrupt->is_ended)
               ? SMLA_OK
               : smla_fail(error, SMLA_ERROR_RUNTIME,
                           "%s: the call was interrupted, and its results are undefined", op);
}
