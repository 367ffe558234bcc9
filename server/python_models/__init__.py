"""Models that users wrote in Python, each instance in a process of its own.

Owns the processes, their queue and `triton_python_backend_utils` as user code sees it.
In: requests to a Python model; calls of user code to other models.
Out: responses, custom metrics, and errors of user code as that request's error.
A process that dies is started again; only its batch fails.
"""
