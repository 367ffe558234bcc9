"""Sends one number after another from a separate thread."""

import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.num_cancelled = 0
        labels = {"model": args["model_name"]}
        kind = pb_utils.MetricFamily
        count = pb_utils.MetricFamily("repeated_numbers_total", "Of this test", kind.COUNTER)
        last = pb_utils.MetricFamily("last_number", "Of this test", kind.GAUGE)
        sizes = pb_utils.MetricFamily("sizes", "Of this test", kind=kind.HISTOGRAM)
        self.count, self.last = count.Metric(labels=labels), last.Metric(labels=labels)
        self.sizes = sizes.Metric(labels=labels, buckets=[1.0, 4.5])

    def execute(self, requests):
        for request in requests:
            numbers = request.inputs()[0].as_numpy().tolist()
            if numbers and numbers[0] == -1:
                os.kill(os.getpid(), 9)
            if numbers and numbers[0] == -2:
                continue
            sender = request.get_response_sender()
            threading.Thread(target=self.repeat, args=(numbers, sender)).start()

    def repeat(self, numbers, sender):
        for number in numbers:
            if number == -3:
                while not sender.is_cancelled():
                    time.sleep(0.001)
                self.num_cancelled += 1
                break
            if number == -4:
                time.sleep(1.0)
                continue
            self.count.increment(1)
            self.last.set(number)
            self.sizes.observe(number)
            sender.send(self.response("OUT", number))
        sender.send(self.response("CANCELLED", self.num_cancelled), flags=FINAL)

    def response(self, name, number):
        tensor = pb_utils.Tensor(name, np.array([number], np.int32))
        return pb_utils.InferenceResponse([tensor])
