"""Time of each operator.

On an accelerator this is the time of the launch. [`latency`](tools/latency.md) waits for kernels,
subtracts its own cost, and follows steps, modules and threads.
"""

import collections
import time

import amanda


class Timing(amanda.Tool):
    def __init__(self, clock=time.perf_counter):
        super().__init__()
        self.clock = clock
        self.began = {}
        self.calls = collections.Counter()
        self.seconds = collections.Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, op):
        op.insert_before_op(self.begin, inputs=[], observe=True, name=op.name)
        op.insert_after_op(self.end, observe=True, name=op.name)

    def begin(self, name):
        self.began[name] = self.clock()

    def end(self, *outputs, name):
        self.seconds[name] += self.clock() - self.began[name]
        self.calls[name] += 1
