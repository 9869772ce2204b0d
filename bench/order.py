"""What the data order costs: python bench/order.py

65,536 sample indices out of 10**12, at once: seconds and the peak of what numpy allocates for it.
"""

import json
import statistics
import time
import tracemalloc

from contest import machine

from lockstep.data.sampler import Shuffled


def main():
    size, count = 10**12, 65536
    order, times = Shuffled(size, 0), []
    for turn in range(31):
        start = turn * 31_415_926_535 % (size - count)
        began = time.perf_counter()
        order.at(start, start + count)
        times.append(time.perf_counter() - began)
    tracemalloc.start()
    order.at(0, count)
    peak = tracemalloc.get_traced_memory()[1]
    print(machine())
    print(f"  {count} of {size}: {1e3 * statistics.median(times):.2f} ms, peak {peak / 1e6:.1f} MB")
    print(json.dumps({"milliseconds": 1e3 * statistics.median(times), "peak_bytes": peak}))


if __name__ == "__main__":
    main()
