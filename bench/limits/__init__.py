"""The upper limits of a machine.

Owns the roofline of a step, the measured ceilings and well-known model shapes. In: a model's
shape, a load and a device. Out: the tokens a second that no engine exceeds. Every operator of a
step counts at its own limit, one after another.
"""
