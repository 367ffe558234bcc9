"""What each step computes: the scheduler, its admission policies and the step that they plan.

In come checked requests and each step's sampled ids; out go decisions (`SchedulerOutput`) for
the ranks and emissions (sequence, id, finish reason) for the front ends. All of it runs on
rank 0 and does no I/O. Start at `scheduler.py`; `admission_policy.py` is where a
new policy plugs in.
"""
