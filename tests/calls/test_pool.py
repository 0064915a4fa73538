"""The threads of csrc/cpu/machine/pool.c: what they must not take over from the thread that happens
to start them, and that a call does not wait for one that the scheduler does not run."""

import os

import pytest
from helpers import BESIDE_TESTS, printed_by_python

pytestmark = pytest.mark.frameworks

# NumPy's BLAS starts threads, too; it must not have any here.
POOL = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4"}

# Runs a call that is large enough for several threads; `workers` are those that it has started.
SETUP = (
    BESIDE_TESTS
    + """
import os, signal, threading, time
import ml_dtypes, numpy as np, sparse_mla

def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}

def workers_since(before):
    time.sleep(0.2)  # a thread that was joined may be in the list a little longer
    return threads() - before

def status_of(thread, field):
    for line in open(f"/proc/self/task/{thread}/status"):
        if line.startswith(field + ":"):
            return line.split(":")[1].strip()

q = np.ones((16, 16, 576), ml_dtypes.bfloat16)
kv = np.zeros((512, 576), ml_dtypes.bfloat16)
indices = np.tile(np.arange(512, dtype=np.int32), (16, 1))

def call():
    return sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.04)

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""
)


def printed(script: str, **environment) -> str:
    return printed_by_python("-c", SETUP + script, **POOL | environment).strip()


SIGNALS = """
before = threads()
signal.pthread_sigmask(signal.SIG_SETMASK, {caller_blocks})
call()
workers = workers_since(before)
every = sum(1 << (number - 1) for number in signal.valid_signals())
ours = {{signal.SIGKILL, signal.SIGSTOP}}  # nobody can block these
every -= sum(1 << (number - 1) for number in ours)
print(len(workers), all(int(status_of(w, "SigBlk"), 16) & every == every for w in workers),
      signal.pthread_sigmask(signal.SIG_BLOCK, []) == set({caller_blocks}))
"""


@pytest.mark.parametrize("caller_blocks", ["[]", "[signal.SIGTERM, signal.SIGUSR1]"])
def test_workers_block_all_signals(caller_blocks):
    """Else they take signals that the process blocks everywhere else and waits for."""
    assert printed(SIGNALS.format(caller_blocks=caller_blocks)) == "3 True True"


WAITED_FOR = """
call()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigtimedwait({signal.SIGTERM}, 20).si_signo == signal.SIGTERM)
"""


def test_a_process_gets_the_signal_that_it_waits_for():
    assert printed(WAITED_FOR) == "True"


AFFINITY = """
before = threads()
everywhere = os.sched_getaffinity(0)

def pinned():
    os.sched_setaffinity(0, {min(everywhere)})
    call()

if os.environ["IN_MAIN_THREAD"] == "1":
    pinned()
    os.sched_setaffinity(0, everywhere)
else:
    in_thread(pinned)
workers = workers_since(before)
print(len(workers), all(os.sched_getaffinity(w) == everywhere for w in workers))
"""


@pytest.mark.parametrize("in_main_thread", ["0", "1"])
@pytest.mark.parametrize("count", ["4", ""])
def test_a_pinned_first_caller_binds_nobody_else(in_main_thread, count):
    processors = len(os.sched_getaffinity(0))
    answer = printed(AFFINITY, IN_MAIN_THREAD=in_main_thread, OMP_NUM_THREADS=count)
    assert answer == f"{int(count or processors) - 1} {processors > 0}"


STACK = """
threading.stack_size(64 * 1024)
before = threads()
in_thread(call)
assert workers_since(before)
sizes = []
for line in open("/proc/self/smaps"):
    words = line.split()
    if "-" in words[0] and len(words[0].split("-")) == 2:
        first, last = (int(x, 16) for x in words[0].split("-"))
        sizes.append(last - first)
print(sum(size == 1 << 20 for size in sizes) >= 3)
"""


def test_workers_have_stacks_of_their_own_size():
    assert printed(STACK) == "True"


# A worker of the policy SCHED_IDLE runs only where no other thread wants to, as on a host that
# other programs keep busy. `call` is one of those that take a part of a millisecond.
BUSY = """
import subprocess, sys
call()
call()
for thread in threads() - {os.getpid()}:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
spin = [sys.executable, "-c", "while True: pass"]
load = [subprocess.Popen(spin) for _ in range(2 * len(os.sched_getaffinity(0)))]
try:
    time.sleep(0.3)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        time.sleep(0.002)
finally:
    for process in load:
        process.kill()
print(sorted(seconds)[15])
"""


def test_a_call_on_a_busy_host_does_not_wait_for_its_workers():
    """Before workers were recalled, this was some hundred times the time of one thread."""
    one, two = (float(printed(BUSY, OMP_NUM_THREADS=count)) for count in "12")
    assert two <= 5 * one, f"one thread {1e3 * one:.2f} ms, two {1e3 * two:.2f} ms"


MANY = """
want = [np.asarray(x).tobytes() for x in call()]
def work():
    for _ in range(100):
        assert [np.asarray(x).tobytes() for x in call()] == want
callers = [threading.Thread(target=work) for _ in range(8)]
for thread in callers: thread.start()
for thread in callers: thread.join()
print("same")
"""


def test_recalled_shares_give_the_same_bits():
    """Eight callers compete for three workers, so that many shares are recalled."""
    assert printed(MANY) == "same"
