"""Gives back one number after the other, from a thread of its own."""

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
        kinds = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        names = "repeated_numbers", "last_number"
        families = [
            pb_utils.MetricFamily(n, "Of this test", k)
            for n, k in zip(names, kinds, strict=True)
        ]
        self.count, self.last = (family.Metric(labels=labels) for family in families)

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
            self.count.increment(1)
            self.last.set(number)
            sender.send(self.response("OUT", number))
        sender.send(self.response("CANCELLED", self.num_cancelled), flags=FINAL)

    def response(self, name, number):
        tensor = pb_utils.Tensor(name, np.array([number], np.int32))
        return pb_utils.InferenceResponse([tensor])
